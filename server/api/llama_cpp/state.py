"""`GET /slots` and `/props`: which slots are at work, and what holds where a request says nothing.

Neither shows a prompt, or anything else of a request: whoever asks may not be who sent it.
"""

from collections.abc import Sequence
from typing import Final, TypedDict

from starlette.requests import Request
from starlette.responses import Response

from models.inference.sampling_params import SamplingParams
from server.api import PRODUCT
from server.api.context import ServedModel, context_of
from server.api.errors import Code, retry_later
from server.api.json_body import JsonBody
from server.engine.commands import DescribeSlots, SlotState

NO_LIMIT: Final = -1
RETRY_SECONDS: Final = 1


class SlotBody(TypedDict):
    """One slot."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool


class DefaultParams(TypedDict):
    """The sampling of a request, or of one that says nothing of it."""

    n_predict: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    stop: list[str]


class GenerationSettings(TypedDict):
    """What holds for a request that says nothing."""

    n_ctx: int
    params: DefaultParams


class Modalities(TypedDict):
    """What a prompt may hold beside text."""

    vision: bool
    audio: bool


class PropsBody(TypedDict):
    """The server and its model."""

    default_generation_settings: GenerationSettings
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: Modalities
    build_info: str


async def slots(request: Request) -> Response:
    """Lists the slots; with `?fail_on_no_slot=1` it answers 503 while none is free."""
    context = context_of(request)
    model = context.find_model(request.query_params.get("model"))
    found: tuple[SlotState, ...] = await context.running_engine(model).execute(DescribeSlots())
    if request.query_params.get("fail_on_no_slot") == "1" and all(slot.is_leased for slot in found):
        raise retry_later(Code.NO_FREE_SLOT, "no slot is free", RETRY_SECONDS)
    return JsonBody([_slot(slot, model) for slot in found])


async def props(request: Request) -> Response:
    """Describes the server."""
    context = context_of(request)
    model = context.find_model(request.query_params.get("model"))
    body: PropsBody = {
        "default_generation_settings": {"n_ctx": model.context_tokens, "params": params_body(model.sampling)},
        "total_slots": context.config.slots,
        "model_alias": model.id,
        "model_path": model.id,
        "chat_template": model.facts.chat_template,
        "bos_token": model.facts.bos_token,
        "eos_token": model.facts.eos_token,
        "modalities": {"vision": False, "audio": False},
        "build_info": PRODUCT,
    }
    return JsonBody(body)


def _slot(slot: SlotState, model: ServedModel) -> SlotBody:
    return {
        "id": slot.index,
        "n_ctx": model.context_tokens,
        "speculative": False,
        "is_processing": slot.is_leased,
    }


def params_body(sampling: SamplingParams, n_predict: int = NO_LIMIT, stop: Sequence[str] = ()) -> DefaultParams:
    """Returns what is sampled, how much, and up to which texts."""
    return {
        "n_predict": n_predict,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "typical_p": sampling.typical_p,
        "top_n_sigma": sampling.top_n_sigma,
        "xtc_probability": sampling.xtc_probability,
        "xtc_threshold": sampling.xtc_threshold,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "dry_multiplier": sampling.dry_multiplier,
        "dry_base": sampling.dry_base,
        "dry_allowed_length": sampling.dry_allowed_length,
        "dry_penalty_last_n": sampling.dry_penalty_last_n,
        "stop": list(stop),
    }
