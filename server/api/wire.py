"""Fields that all of OpenAI's generation endpoints share, and how a body is checked against its type.

Every field is optional, and null means the same as absent. A field that would change the answer in a way this
server cannot do is refused by name, never ignored; what merely describes the request is taken with its type
checked; a field that is unknown altogether is left alone and listed at DEBUG.
"""

import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from server.api.errors import ApiError, Code

logger = logging.getLogger(__name__)

SYSTEM_FINGERPRINT = "mlx-serve"
"""What every answer names as its back end; the same for all requests."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
RANDOM_SEED = -1
"""What clients send for "no seed"."""

Body = TypeVar("Body", bound=BaseModel)
Neutral = Mapping[str, tuple[Any, ...]]

REFUSED: Neutral = {
    "n": (1,),
    "best_of": (1,),
    "bad_words": ([],),
    "dry_multiplier": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "grammar": ("",),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1, 1.0),
    "logits_processors": (),
    "min_tokens": (0,),
    "mirostat": (0,),
    "n_probs": (0,),
    "prompt_logprobs": (0,),
    "repeat_penalty": (1, 1.0),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "tfs_z": (1, 1.0),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    "xtc_probability": (0, 0.0),
}
"""Fields that this server cannot honour, with the values that ask for nothing."""


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
_Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
_Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]


class WireModel(BaseModel):
    """Base of all wire types: JSON's own types without conversion, unknown fields kept apart."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")


class StreamOptions(WireModel):
    """What a stream holds beside the text."""

    include_usage: bool | None = None
    """Send a chunk with the token counts before the end."""
    include_obfuscation: bool | None = None
    """Taken and without effect: nothing is obfuscated here."""


class GenerationBody(WireModel):
    """Fields of a request for text, whatever the prompt looks like."""

    model: str | None = None
    """Id of a served model; may be left out where only one is served."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: _Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: _Share | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """-1 and 0 keep all tokens."""
    min_p: _Share | None = None
    seed: Annotated[int, Field(ge=RANDOM_SEED, lt=2**63)] | None = None
    """-1 is the same as none."""
    repetition_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: dict[str, _Bias] | None = None
    """Token id, as a text, to bias."""
    stop: Annotated[list[_StopString], Field(max_length=MAX_STOP_STRINGS), BeforeValidator(_one_or_many)] | None = (
        None
    )
    ignore_eos: bool | None = None
    """Generate until `max_tokens` whatever is sampled."""
    session_id: str | None = None
    cache_prompt: bool | None = None
    """False: neither reuse nor keep the state of this prompt."""
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    """State is shared only between requests with the same salt."""
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    priority: Literal["interactive", "background"] | None = None
    service_tier: str | None = None
    """"flex" is the same as `priority: background`."""
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    store: bool | None = None

    def wants_usage(self) -> bool:
        """Whether a stream shall hold the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage is True


def parse_body(kind: type[Body], raw: dict[str, Any], refused: Neutral) -> Body:
    """Returns the checked body; raises ApiError (400) that names the first field that is wrong."""
    for name, neutral in refused.items():
        _check_neutral(name, raw.get(name), neutral)
    try:
        body = kind.model_validate(raw)
    except ValidationError as error:
        raise _as_api_error(error.errors(include_url=False)[0]) from error
    unknown = sorted(set(body.model_extra or ()) - set(refused))
    if unknown:
        logger.debug("fields without meaning here: %s", ", ".join(unknown)[:500])
    return body


def _check_neutral(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    # True equals 1 in Python but is not the number that a client may send for it.
    if value is None or any(value == other and type(value) is type(other) for other in neutral):
        return
    accepted = f"; the only value taken is {_json_text(neutral[0])}" if neutral else ""
    raise ApiError(Code.UNSUPPORTED_PARAMETER, f"{name} is not supported by this server{accepted}", name)


def _json_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace("'", '"') or '""'


def _as_api_error(problem: ErrorDetails) -> ApiError:
    param = param_name(problem["loc"])
    return ApiError(_code_of(problem["type"]), f"{param}: {problem['msg']}", param)


def _code_of(kind: str) -> Code:
    if kind == "missing":
        return Code.MISSING_PARAMETER
    return Code.INVALID_TYPE if kind.endswith("_type") else Code.INVALID_VALUE


def param_name(location: tuple[int | str, ...]) -> str:
    """Returns a place in a body as clients write it: `messages[0].content`. Bounded, as names come from them."""
    text = ""
    for step in location:
        if step == "[key]":
            continue
        text += f"[{step}]" if isinstance(step, int) else f".{step}"
    return text.lstrip(".")[:200]
