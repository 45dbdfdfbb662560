"""How a sequence's tokens are chosen, and which values are allowed. Knows no logits and no MLX."""

from dataclasses import dataclass, replace
from functools import cached_property

from models.errors import InvalidParameter

MAX_TOP_LOGPROBS = 20
"""OpenAI's limit."""
MAX_WINDOW = 2**31 - 1
MAX_REPEATED = 256
"""A longer repetition counts like this."""
GREEDY_BELOW = 1e-5
"""Lower temperatures are greedy: dividing by them would overflow."""

ALL_TOKENS = -1


@dataclass(frozen=True)
class SamplingParams:
    """How one sequence's next token is chosen. `check` validates it before queueing."""

    temperature: float = 1.0
    """Range [0, 2]; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus mass, range (0, 1]."""
    top_k: int = 0
    min_p: float = 0.0
    """At least this fraction of the likeliest token's probability, range [0, 1]."""
    typical_p: float = 1.0
    """Mass of tokens with information nearest to the expected, range (0, 1]."""
    top_n_sigma: float = 0.0
    """Standard deviations below the largest logit; 0 keeps all, range [0, 100]."""
    xtc_probability: float = 0.0
    """Share of draws with XTC, range [0, 1]."""
    xtc_threshold: float = 0.1
    """Likely from here on for XTC, range [0, 1]."""
    seed: int | None = None
    """The same seed gives the same noise, however rows were batched. Logits may differ in their last bits."""
    repetition_penalty: float = 1.0
    """Divides positive, multiplies negative logits of seen tokens, like Hugging Face; range (0, 10]."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Of output tokens, like `presence_penalty`; range [-2, 2]."""
    repeat_last_n: int | None = None
    """Last tokens of prompt and output for the three penalties; -1 is all, 0 none, None each one's own range."""
    dry_multiplier: float = 0.0
    """Penalty on continuing a repetition of `dry_allowed_length`, range [0, 100]."""
    dry_base: float = 1.75
    """Factor per further repeated token, range [1, 100]."""
    dry_allowed_length: int = 2
    """Range [1, `MAX_REPEATED`]."""
    dry_penalty_last_n: int = ALL_TOKENS
    """Last tokens searched for repetitions; -1 is all, 0 none."""
    dry_breakers: tuple[int, ...] = ()
    """No repetition reaches across."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """By token id, range [-100, 100]."""
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    top_logprobs: int | None = None
    """Likeliest tokens reported with each, range [0, `MAX_TOP_LOGPROBS`]; None: no log-probabilities."""
    min_tokens: int = 0
    """No `end_token_ids` among as many first tokens."""
    end_token_ids: tuple[int, ...] = ()

    @cached_property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @cached_property
    def uses_xtc(self) -> bool:
        return self.xtc_probability > 0 and not self.is_greedy

    @cached_property
    def looks_back(self) -> bool:
        return self.is_penalised or self.is_dry or self.longest_bad_word > 1

    @cached_property
    def longest_bad_word(self) -> int:
        return max(map(len, self.bad_words), default=0)

    @cached_property
    def is_dry(self) -> bool:
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    @cached_property
    def is_penalised(self) -> bool:
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0) and self.repeat_last_n != 0

    def within(self, num_tokens: int) -> "SamplingParams":
        """The parameters for at most `num_tokens`, with windows no longer."""
        repeat, dry = self.repeat_last_n, self.dry_penalty_last_n
        return replace(
            self,
            repeat_last_n=ALL_TOKENS if repeat is not None and repeat >= num_tokens else repeat,
            dry_penalty_last_n=num_tokens if self.is_dry and not 0 <= dry < num_tokens else dry,
        )


def check(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidParameter for a value not a number, not finite or out of range."""
    _check_number("temperature", params.temperature, 0.0, 2.0)
    _check_number("top_p", params.top_p, 0.0, 1.0, exclusive_low=True)
    _check_integer("top_k", params.top_k, 0, 2**63 - 1)
    _check_number("min_p", params.min_p, 0.0, 1.0)
    _check_number("typical_p", params.typical_p, 0.0, 1.0, exclusive_low=True)
    _check_number("top_n_sigma", params.top_n_sigma, 0.0, 100.0)
    _check_number("xtc_probability", params.xtc_probability, 0.0, 1.0)
    _check_number("xtc_threshold", params.xtc_threshold, 0.0, 1.0)
    if params.seed is not None:
        _check_integer("seed", params.seed, -(2**63), 2**64 - 1)
    if params.top_logprobs is not None:
        _check_integer("top_logprobs", params.top_logprobs, 0, min(MAX_TOP_LOGPROBS, vocab_size))
    _check_integer("min_tokens", params.min_tokens, 0, 2**63 - 1)
    _check_number("repetition_penalty", params.repetition_penalty, 0.0, 10.0, exclusive_low=True)
    _check_number("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _check_number("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    if params.repeat_last_n is not None:
        _check_integer("repeat_last_n", params.repeat_last_n, ALL_TOKENS, MAX_WINDOW)
    _check_number("dry_multiplier", params.dry_multiplier, 0.0, 100.0)
    _check_number("dry_base", params.dry_base, 1.0, 100.0)
    _check_integer("dry_allowed_length", params.dry_allowed_length, 1, MAX_REPEATED)
    _check_integer("dry_penalty_last_n", params.dry_penalty_last_n, ALL_TOKENS, MAX_WINDOW)
    for token_id in params.dry_breakers:
        _check_integer("dry_breakers", token_id, 0, vocab_size - 1)
    for token_id in params.allowed_token_ids:
        _check_integer("allowed_token_ids", token_id, 0, vocab_size - 1)
    for token_id in (one for word in params.bad_words for one in word):
        _check_integer("bad_words", token_id, 0, vocab_size - 1)
    for token_id, bias in params.logit_bias:
        _check_integer("logit_bias", token_id, 0, vocab_size - 1)
        _check_number("logit_bias", bias, -100.0, 100.0)


def _check_number(param: str, value: float, low: float, high: float, *, exclusive_low: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (exclusive_low and value == low):
        bracket = "(" if exclusive_low else "["
        raise InvalidParameter(param, f"{param} must be a number in {bracket}{low:g}, {high:g}], not {value!r}")


def _check_integer(param: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidParameter(param, f"{param} must be an integer in [{low}, {high}], not {value!r}")
