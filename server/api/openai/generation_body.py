"""Fields that all of OpenAI's generation endpoints share. All are optional, and null means the same as absent."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from models.inference.sampling_params import MAX_REPEATED, MAX_WINDOW
from server.api.errors import ApiError, Code
from server.api.ollama.body import Options
from server.api.openai.output_format import BoundBody
from server.api.typed_body import BodyModel, Whole, as_whole

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 64
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 128
MAX_BREAKERS = 64
MAX_BREAKER_CHARACTERS = 64
RANDOM_SEED = -1
"""What clients send for "no seed"."""

NO_LIMIT = -1
"""What clients send for "until the context is full"."""


def as_limit(value: Any) -> Any:
    """Returns a number of tokens that may be written as 16.0, or None for "no limit"."""
    whole = as_whole(value)
    return None if whole == NO_LIMIT else whole


def _stop_strings(value: Any) -> Any:
    """Takes one text or many; an empty one, as forms of clients send it, stands for none."""
    texts = [value] if isinstance(value, str) else value
    return [text for text in texts if text != ""] if isinstance(texts, list) else texts


def _priority(value: Any) -> Any:
    """Other servers number their priorities, and 0 is what a request has without one."""
    return None if value == 0 and not isinstance(value, bool) else value


_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
_Breaker = Annotated[str, Field(max_length=MAX_BREAKER_CHARACTERS)]
_BadWord = Annotated[str, Field(max_length=MAX_BAD_WORD_CHARACTERS)]
_Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
_Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_NonzeroShare = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
_RepetitionPenalty = Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)]
_Window = Annotated[Whole, Field(ge=-1, le=MAX_WINDOW)]
_MinTokens = Annotated[Whole, Field(ge=0, lt=2**63)] | None
_Limit = Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(as_limit)]


class StreamOptions(BodyModel):
    """What a stream holds beside the text."""

    include_usage: bool | None = None
    """Send a chunk with the token counts before the end."""
    include_obfuscation: bool | None = None
    """Taken and without effect: nothing is obfuscated here."""
    continuous_usage_stats: bool | None = None
    """Where usage is included, send the counts so far in every chunk."""


class GenerationBody(BoundBody):
    """Fields of a request for text, whatever the prompt looks like."""

    model: str | None = None
    """Id of a served model; may be left out where only one is served."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: _Limit = None
    """-1 is the same as none."""
    max_completion_tokens: _Limit = None
    max_new_tokens: _Limit = None
    n_predict: _Limit = None
    """Other names of `max_tokens`; where several are given, the smallest counts."""
    n: Annotated[Whole, Field(ge=1)] | None = None
    """How many answers are given to each prompt."""
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: _Share | None = None
    top_k: Annotated[Whole, Field(ge=-1)] | None = None
    """-1 and 0 keep all tokens."""
    min_p: _Share | None = None
    typical_p: _NonzeroShare | None = None
    top_n_sigma: Annotated[float, Field(ge=-1, le=100, allow_inf_nan=False)] | None = None
    """0 and below keep all tokens."""
    xtc_probability: _Share | None = None
    xtc_threshold: _Share | None = None
    seed: Annotated[Whole, Field(ge=RANDOM_SEED, lt=2**63)] | None = None
    """-1 is the same as none."""
    repetition_penalty: _RepetitionPenalty | None = None
    repeat_penalty: _RepetitionPenalty | None = None
    """Another name of `repetition_penalty`; the two may not contradict each other."""
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repeat_last_n: _Window | None = None
    """How many of the last tokens the penalties look at; -1 is all of them, 0 none."""
    repetition_context_size: _Window | None = None
    presence_context_size: _Window | None = None
    frequency_context_size: _Window | None = None
    """mlx-lm's names of it, one for each penalty; those of penalties in force may not differ."""
    dry_multiplier: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    """0 penalises no repetition by its length."""
    dry_base: Annotated[float, Field(ge=1, le=100, allow_inf_nan=False)] | None = None
    dry_allowed_length: Annotated[Whole, Field(ge=1, le=MAX_REPEATED)] | None = None
    dry_penalty_last_n: _Window | None = None
    dry_sequence_breakers: Annotated[list[_Breaker], Field(max_length=MAX_BREAKERS)] | None = None
    """Texts that no repetition reaches across."""
    logit_bias: dict[str, _Bias] | None = None
    """Token id, as a text, to bias."""
    allowed_token_ids: Annotated[list[int], Field(min_length=1)] | None = None
    """Nothing but these tokens is sampled."""
    bad_words: Annotated[list[_BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    """Texts that are not in the answer, as far as it spells them with the tokens that the tokenizer would take."""
    stop: Annotated[list[_StopString], Field(max_length=MAX_STOP_STRINGS), BeforeValidator(_stop_strings)] | None = (
        None
    )
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKENS)] | None = None
    return_token_ids: bool | None = None
    """Tell the tokens of prompt and answer."""
    return_tokens_as_token_ids: bool | None = None
    """Call the tokens in `logprobs` by their ids: `token_id:42`."""
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    """Another name of it."""
    min_tokens: _MinTokens = None
    """Neither the model nor a stop text or token ends the answer before."""
    min_new_tokens: _MinTokens = None
    """Another name of it; the larger counts."""
    ignore_eos: bool | None = None
    """Generate until `max_tokens` whatever is sampled."""
    session_id: str | None = None
    cache_prompt: bool | None = None
    """False: neither reuse nor keep the state of this prompt."""
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    """State is shared only between requests with the same salt."""
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    priority: Annotated[Literal["interactive", "background"] | None, BeforeValidator(_priority)] = None
    service_tier: str | None = None
    """"flex" is the same as `priority: background`."""
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    store: bool | None = None
    options: Options | None = None
    """Ollama's fields, from clients that take every local server for Ollama; fields of the body itself come first."""

    def num_top_logprobs(self) -> int | None:
        """Returns how many of the likeliest tokens are told with each token; None where nothing is to be told."""
        return None

    def wants_usage(self) -> bool:
        """Whether a stream shall hold the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage is True

    def wants_usage_always(self) -> bool:
        """Whether each chunk of a stream shall hold the token counts so far."""
        options = self.stream_options
        return options is not None and self.wants_usage() and options.continuous_usage_stats is True

    def keeps_stop(self) -> bool:
        """Whether the stop text that ends an answer is part of it."""
        return self.include_stop_str_in_output is True or self.no_stop_trim is True

    def least(self) -> int:
        """Returns the fewest tokens to generate; raises ApiError where they are more than the most."""
        least, limit = max(self.min_tokens or 0, self.min_new_tokens or 0), self.limit()
        if limit is not None and least > limit:
            param = "min_tokens" if self.min_tokens == least else "min_new_tokens"
            message = f"{param}: {least} tokens are more than the {limit} that the answer may have"
            raise ApiError(Code.INVALID_VALUE, message, param)
        return least

    def limit(self) -> int | None:
        """Returns the most tokens to generate, or None where the request does not say."""
        given = (self.max_tokens, self.max_completion_tokens, self.max_new_tokens, self.n_predict)
        return min(
            (limit for limit in given if limit is not None),
            default=None if self.options is None else self.options.limit,
        )
