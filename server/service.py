"""From settings to a model that can be asked: finds it, loads it, and puts an engine behind it."""

import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from models.errors import InvalidParameter
from models.inference.sampling_params import SamplingParams, check
from models.loader import LoadedModel, load
from models.mlx_lm_import import get_total_parameters
from models.names import DEMO, resolve
from models.prompt.chat_template import ChatRenderer
from server.api.context import ServedModel
from server.config import ServerConfig
from server.engine.engine import Engine, EngineConfig
from server.memory_budget import choose_budget_bytes, choose_pool_bytes, read_machine

logger = logging.getLogger(__name__)

_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, eq=False)
class Service:
    """One model, ready to answer, and what its start-up report says. The engine is not started yet."""

    model: ServedModel
    engine: Engine
    num_parameters: int
    """Weights; a quantized matrix counts those that it stands for."""
    weights_bytes: int
    budget_bytes: int
    model_context_tokens: int
    """The model's own limit; `model.context_tokens` may be lower."""


def open_service(config: ServerConfig) -> Service:
    """Loads the first of the configured models; blocks while it does. Raises ModelError."""
    name = config.models[0]
    path = resolve(name)
    loaded = load(path, model_id(name))
    weights_bytes = _weights_bytes(loaded.model)
    budget_bytes = config.cache_memory_bytes
    if budget_bytes is None:
        budget_bytes = choose_budget_bytes(read_machine(mx.device_info()), weights_bytes)
    _bound_pool(choose_pool_bytes(budget_bytes))
    served = _served_model(loaded, config)
    engine_config = EngineConfig(
        max_slots=config.slots,
        budget_bytes=budget_bytes,
        context_tokens=served.context_tokens,
        chunk_tokens=config.chunk_tokens,
        max_waiting=config.max_waiting,
        disk_folder=Path(config.cache_dir).expanduser() if config.cache_disk_bytes is not None else None,
        disk_bytes=config.cache_disk_bytes or 0,
        disk_write_bytes_per_day=config.cache_disk_write_bytes_per_day,
    )
    return Service(
        model=served,
        engine=Engine.for_model(loaded, engine_config),
        num_parameters=int(get_total_parameters(loaded.model)),
        weights_bytes=weights_bytes,
        budget_bytes=budget_bytes,
        model_context_tokens=loaded.context_tokens,
    )


def _bound_pool(num_bytes: int) -> None:
    """Has MLX keep no more freed buffers than this; where it keeps fewer by itself, as on a CPU, that stays."""
    mx.set_cache_limit(min(num_bytes, mx.set_cache_limit(num_bytes)))


def model_id(name: str) -> str:
    """Returns the name by which clients ask for the model that was named `name` on the command line.

    For a folder that is its own name, and a folder is what `models.names.resolve` takes for one.
    """
    path = Path(name).expanduser()
    if name == DEMO or not path.is_dir():
        return name
    # Not `resolve`: a link has a name of its own, and what it leads to may be called by a hash.
    return Path(os.path.abspath(path)).name or name  # noqa: PTH100


def _served_model(loaded: LoadedModel, config: ServerConfig) -> ServedModel:
    context_tokens = min(config.context_tokens or loaded.context_tokens, loaded.context_tokens)
    served = ServedModel(
        id=loaded.name,
        renderer=ChatRenderer(_template_owner(loaded), max_tokens=context_tokens - 1),
        context_tokens=context_tokens,
        vocab_size=loaded.vocab_size,
        created=int(time.time()),
        tool_syntax=loaded.tool_syntax,
        reasoning_format=loaded.reasoning_format,
        sampling=read_sampling(loaded.path / "generation_config.json", loaded.vocab_size),
    )
    if served.tool_calls == "text":
        logger.warning(
            "%s takes tools, but how it writes calls is not known: they come as text, not as tool_calls", served.id
        )
    return served


def _template_owner(loaded: LoadedModel) -> Any:
    """Returns what renders conversations: the tokenizer, whose template then decides by itself whether to think.

    mlx-lm's wrapper asks every template to think; it is needed for the models whose template is code of mlx-lm.
    """
    return loaded.tokenizer if loaded.tokenizer.chat_template else loaded.tokenizer_wrapper


def read_sampling(path: Path, vocab_size: int) -> SamplingParams:
    """Returns the sampling that a model's makers recommend; the usual defaults where they say nothing usable."""
    try:
        recommended: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        given = {key: recommended[key] for key in _SAMPLING_KEYS if recommended.get(key) is not None}
        if recommended.get("do_sample") is False:
            given["temperature"] = 0.0
        params = SamplingParams(**given)
        check(params, vocab_size)
    except FileNotFoundError:
        return SamplingParams()
    except (OSError, ValueError, TypeError, AttributeError, InvalidParameter) as error:
        logger.warning("%s is not used: %s", path, error)
        return SamplingParams()
    return params


def _weights_bytes(model: Any) -> int:
    return sum(array.nbytes for _, array in cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())))
