"""How a sequence's tokens are chosen, and which values are allowed. Knows no logits and no MLX."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from typing import Any

from models.errors import InvalidParameter

MAX_TOP_LOGPROBS = 20
"""OpenAI's limit."""
MAX_WINDOW = 2**31 - 1
MAX_REPEATED = 256
"""A longer repetition counts like this."""
GREEDY_BELOW = 1e-5
"""Lower temperatures are greedy: dividing by them would overflow."""

ALL_TOKENS = -1


def _number(default: float, low: float, high: float, **how: bool) -> Any:
    """A finite number in `[low, high]`, or in `(low, high]`."""
    return field(default=default, metadata={"low": low, "high": high, **how})


def _integer(default: int | None, low: int, high: int) -> Any:
    return field(default=default, metadata={"low": low, "high": high, "is_integer": True})


@dataclass(frozen=True)
class SamplingParams:
    """How one sequence's next token is chosen. `check` validates it before queueing."""

    temperature: float = _number(1.0, 0, 2)
    """0 is greedy."""
    top_p: float = _number(1.0, 0, 1, excludes_low=True)
    """Nucleus mass."""
    top_k: int = _integer(0, 0, 2**63 - 1)
    min_p: float = _number(0.0, 0, 1)
    """At least this fraction of the likeliest token's probability."""
    typical_p: float = _number(1.0, 0, 1, excludes_low=True)
    """Mass of tokens with information nearest to the expected."""
    top_n_sigma: float = _number(0.0, 0, 100)
    """Standard deviations below the largest logit; 0 keeps all."""
    xtc_probability: float = _number(0.0, 0, 1)
    """Share of draws with XTC."""
    xtc_threshold: float = _number(0.1, 0, 1)
    """Likely from here on for XTC."""
    seed: int | None = _integer(None, -(2**63), 2**64 - 1)
    """The same seed gives the same noise, however rows were batched. Logits may differ in their last bits."""
    repetition_penalty: float = _number(1.0, 0, 10, excludes_low=True)
    """Divides positive, multiplies negative logits of seen tokens, like Hugging Face."""
    presence_penalty: float = _number(0.0, -2, 2)
    frequency_penalty: float = _number(0.0, -2, 2)
    """Over output tokens, as `presence_penalty`."""
    repeat_last_n: int | None = _integer(None, ALL_TOKENS, MAX_WINDOW)
    """Last tokens of prompt and output for the three penalties; -1 is all, 0 none, None each one's own range."""
    dry_multiplier: float = _number(0.0, 0, 100)
    """Penalty on continuing a repetition of `dry_allowed_length`."""
    dry_base: float = _number(1.75, 1, 100)
    """Factor per further repeated token."""
    dry_allowed_length: int = _integer(2, 1, MAX_REPEATED)
    dry_penalty_last_n: int = _integer(ALL_TOKENS, ALL_TOKENS, MAX_WINDOW)
    """Last tokens searched for repetitions; -1 is all, 0 none."""
    dry_breakers: tuple[int, ...] = ()
    """No repetition reaches across."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """By token id, range [-100, 100]."""
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    top_logprobs: int | None = None
    """Likeliest tokens reported with each, range [0, `MAX_TOP_LOGPROBS`]; None: no log-probabilities."""
    min_tokens: int = _integer(0, 0, 2**63 - 1)
    """No `end_token_ids` among as many first tokens."""
    end_token_ids: tuple[int, ...] = ()

    @cached_property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @cached_property
    def is_dry(self) -> bool:
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    def within(self, num_tokens: int) -> "SamplingParams":
        """The parameters for at most `num_tokens`, with windows no longer."""
        repeat, dry = self.repeat_last_n, self.dry_penalty_last_n
        return replace(
            self,
            repeat_last_n=ALL_TOKENS if repeat is not None and repeat >= num_tokens else repeat,
            dry_penalty_last_n=num_tokens if self.is_dry and not 0 <= dry < num_tokens else dry,
        )


NUMBERS: Mapping[str, type] = {
    one.name: int if one.metadata.get("is_integer") else float
    for one in fields(SamplingParams)
    if one.metadata and one.name != "min_tokens"
}
"""Parameters that a request sets by a number, and its type."""


def settled(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name, with `SamplingParams`' own for those by which clients switch something off."""
    settled_values = dict(values)
    if settled_values.get("seed") is not None and settled_values["seed"] < 0:
        settled_values["seed"] = None
    if settled_values.get("top_k", 0) < 0:
        settled_values["top_k"] = 0
    if settled_values.get("top_n_sigma", 0) < 0:
        settled_values["top_n_sigma"] = 0.0
    if settled_values.get("typical_p") == 0:
        settled_values["typical_p"] = 1.0
    if settled_values.get("top_p") == 0:
        # A mass of 0 leaves only the likeliest token.
        settled_values |= {"top_p": 1.0, "top_k": 1}
    return settled_values


def check(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidParameter for a value not a number, not finite or out of range."""
    for one in fields(params):
        value = getattr(params, one.name)
        if one.metadata and (value is not None or one.default is not None):
            _check(one.name, value, **one.metadata)
    if params.top_logprobs is not None:
        _check("top_logprobs", params.top_logprobs, 0, min(MAX_TOP_LOGPROBS, vocab_size), is_integer=True)
    token_ids = {
        "dry_breakers": params.dry_breakers,
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": chain.from_iterable(params.bad_words),
        "logit_bias": dict(params.logit_bias),
    }
    for name, token_id in ((name, token_id) for name, ids in token_ids.items() for token_id in ids):
        _check(name, token_id, 0, vocab_size - 1, is_integer=True)
    for _, bias in params.logit_bias:
        _check("logit_bias", bias, -100, 100)


def _check(
    param: str, value: Any, low: float, high: float, *, is_integer: bool = False, excludes_low: bool = False
) -> None:
    is_of_kind = isinstance(value, int if is_integer else int | float) and not isinstance(value, bool)
    if not is_of_kind or not low <= value <= high or (excludes_low and value == low):
        kind, bracket = "an integer" if is_integer else "a number", "(" if excludes_low else "["
        raise InvalidParameter(param, f"{param} must be {kind} in {bracket}{low}, {high}], not {value!r}")
