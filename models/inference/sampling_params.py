"""How a sequence's tokens are to be chosen, and what of that is allowed. Knows no logits and no MLX."""

from dataclasses import dataclass

from models.errors import InvalidParameter

MAX_TOP_LOGPROBS = 20
"""As OpenAI has it."""
GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would overflow."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token of one sequence is chosen. Validated by `check` before a request is queued."""

    temperature: float = 1.0
    """0 is greedy; range [0, 2]."""
    top_p: float = 1.0
    """Nucleus mass, range (0, 1]."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction of the likeliest, range [0, 1]."""
    seed: int | None = None
    """Same seed: same noise in the same draw, however the request was batched. The tokens are the same as far as the
    logits are, which may differ in their last bits with the rows of a step and the chunks of the prompt."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of tokens in the prompt or the output, as Hugging Face
    does, for whose `generate` models recommend its value; range (0, 10]."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """These two look at the output tokens of the request only; range [-2, 2]."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and bias, range [-100, 100]."""
    top_logprobs: int | None = None
    """How many of the likeliest tokens are told with each token of the output, and how likely that one was; None
    tells nothing. Range [0, `MAX_TOP_LOGPROBS`]."""
    min_tokens: int = 0
    """None of `end_token_ids` is among the first so many tokens of the output."""
    end_token_ids: tuple[int, ...] = ()
    """Tokens that end the output; needed only with `min_tokens`."""

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is taken, without a draw."""
        return self.temperature < GREEDY_BELOW

    @property
    def is_penalised(self) -> bool:
        """True if tokens that were there before matter."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


def check(params: SamplingParams, vocab_size: int) -> None:
    """Raises `InvalidParameter`, naming the parameter, for what is no number, not finite or out of range."""
    _check_number("temperature", params.temperature, 0.0, 2.0)
    _check_number("top_p", params.top_p, 0.0, 1.0, exclusive_low=True)
    _check_integer("top_k", params.top_k, 0, 2**63 - 1)
    _check_number("min_p", params.min_p, 0.0, 1.0)
    if params.seed is not None:
        _check_integer("seed", params.seed, -(2**63), 2**64 - 1)
    if params.top_logprobs is not None:
        _check_integer("top_logprobs", params.top_logprobs, 0, min(MAX_TOP_LOGPROBS, vocab_size))
    _check_integer("min_tokens", params.min_tokens, 0, 2**63 - 1)
    _check_number("repetition_penalty", params.repetition_penalty, 0.0, 10.0, exclusive_low=True)
    _check_number("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _check_number("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
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
