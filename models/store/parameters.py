"""Parameters of a stored model by the names that Ollama has for them. Pure."""

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from models.errors import InvalidParameter, ModelfileError
from models.store.defaults import ModelDefaults

_SAMPLING = {
    "temperature": ("temperature", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "typical_p": ("typical_p", float),
    "seed": ("seed", int),
    "repeat_penalty": ("repetition_penalty", float),
    "presence_penalty": ("presence_penalty", float),
    "frequency_penalty": ("frequency_penalty", float),
    "repeat_last_n": ("repeat_last_n", int),
}
"""Ollama's names, and those of `SamplingParams` with their kind."""
_LIMITS = {"num_ctx": "context_tokens", "num_predict": "max_tokens"}
_STOP, _TEMPLATE_ARGUMENTS = "stop", "chat_template_kwargs"
PARAMETERS = (*_SAMPLING, *_LIMITS, _STOP, _TEMPLATE_ARGUMENTS)
_OF_LOADING = (
    "num_batch num_gpu main_gpu num_thread num_keep use_mmap use_mlock numa low_vram f16_kv logits_all vocab_only "
    "embedding_only tfs_z mirostat mirostat_tau mirostat_eta penalize_newline draft_num_predict"
)
WITHOUT_EFFECT = frozenset(_OF_LOADING.split())
"""Parameters of Ollama's that are taken and change nothing here."""


@dataclass
class _Told:
    sampling: dict[str, int | float]
    limits: dict[str, int | None]
    stop: list[str]
    template_arguments: Mapping[str, Any] | None = None


def with_parameters(defaults: ModelDefaults, told: Iterable[tuple[str, Any]]) -> ModelDefaults:
    """Returns defaults with what the pairs of name and value say; `stop` may come several times.

    A value is a text, as a Modelfile has it, or as JSON has it. Raises ModelfileError for a parameter that is not
    known, and for a value that it cannot have.
    """
    found = _Told(dict(defaults.sampling), {}, [])
    for name, value in told:
        _take(found, name.lower(), value)
    arguments = defaults.template_arguments if found.template_arguments is None else found.template_arguments
    changed = replace(
        defaults,
        sampling=found.sampling,
        stop=tuple(found.stop) or defaults.stop,
        max_tokens=found.limits.get("max_tokens", defaults.max_tokens),
        context_tokens=found.limits.get("context_tokens", defaults.context_tokens),
        template_arguments=arguments,
    )
    try:
        changed.check()
    except InvalidParameter as error:
        raise ModelfileError(_in_ollamas_words(str(error))) from error
    return changed


def parameters_of(defaults: ModelDefaults) -> Iterable[tuple[str, str]]:
    """Yields the parameters as a Modelfile writes them."""
    for name, (ours, _) in _SAMPLING.items():
        if ours in defaults.sampling:
            value = defaults.sampling[ours]
            yield name, f"{value:g}" if isinstance(value, float) else str(value)
    for name, limit in _LIMITS.items():
        if (number := getattr(defaults, limit)) is not None:
            yield name, str(number)
    for text in defaults.stop:
        yield _STOP, json.dumps(text, ensure_ascii=False)
    if defaults.template_arguments:
        yield _TEMPLATE_ARGUMENTS, json.dumps(defaults.template_arguments, ensure_ascii=False)


def _take(found: _Told, name: str, value: Any) -> None:
    if name in _SAMPLING:
        ours, kind = _SAMPLING[name]
        found.sampling[ours] = _number(name, value, kind)
        _settle(found.sampling, ours)
    elif name in _LIMITS:
        number = _number(name, value, int)
        # Ollama writes -1 for an answer without a limit.
        found.limits[_LIMITS[name]] = None if name == "num_predict" and number < 1 else int(number)
    elif name == _STOP:
        found.stop += _texts(value)
    elif name == _TEMPLATE_ARGUMENTS:
        found.template_arguments = _object(value)
    elif name not in WITHOUT_EFFECT:
        near = difflib.get_close_matches(name, PARAMETERS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(PARAMETERS)}"
        raise ModelfileError(f"there is no parameter {name[:60]!r}; {hint}")


def _settle(sampling: dict[str, int | float], name: str) -> None:
    """Has the values by which Ollama turns something off mean the same here."""
    if name == "top_k" and sampling[name] < 0:
        sampling[name] = 0
    if name == "seed" and sampling[name] < 0:
        del sampling[name]
    if name == "typical_p" and sampling.get(name) == 0:
        sampling[name] = 1.0
    if name == "top_p" and sampling.get(name) == 0:
        # No mass at all is the likeliest token alone.
        sampling |= {"top_p": 1.0, "top_k": 1}


def _number(name: str, value: Any, kind: type) -> int | float:
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError
        number = kind(value)
        if kind is int and isinstance(value, float) and value != number:
            raise ValueError
    except (ValueError, OverflowError):
        whole = "whole " if kind is int else ""
        raise ModelfileError(f"{name} is a {whole}number, not {str(value)[:60]!r}") from None
    return int(number) if kind is int else float(number)


def _texts(value: Any) -> list[str]:
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise ModelfileError("stop is a text, or a list of texts")
    return texts


def _object(value: Any) -> Mapping[str, Any]:
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ModelfileError(f'{_TEMPLATE_ARGUMENTS} is an object in JSON, such as {{"enable_thinking": false}}')
    return found


def _in_ollamas_words(message: str) -> str:
    return message.replace("repetition_penalty", "repeat_penalty")
