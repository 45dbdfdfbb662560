"""Turns the body of OpenAI's generation endpoints, without its prompt, into the engine's parameters."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.inference.sampling_params import SamplingParams, check
from server.api.errors import ApiError, Code
from server.api.ollama.dialect import Options, options_sampling
from server.api.openai.types import RANDOM_SEED, GenerationBody, bad_word_tokens, breaker_tokens
from server.api.params import AnswerGrammar, GenerationParams, check_token_ids
from server.engine.request import Priority
from server.pool.served import ServedModel

BACKGROUND_TIER = "flex"
DEFAULT_TIER = "default"
"""The tier that answers report for all other requests."""
IN_MEMORY = ("in_memory", "in-memory")
"""Values of `prompt_cache_retention` that keep state off the disk."""
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "repeat_last_n",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
)
_WINDOWS = {
    "repetition_context_size": ("repetition_penalty", 1.0),
    "presence_context_size": ("presence_penalty", 0.0),
    "frequency_context_size": ("frequency_penalty", 0.0),
}
"""mlx-lm's names for each penalty's window, and the value that switches the penalty off."""
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)


def read_params(body: GenerationBody, model: ServedModel) -> GenerationParams:
    """Returns the generation parameters of a checked body; raises ApiError or InvalidParameter."""
    sampling = _with_one_window(_sampling(body, model), body)
    check(sampling, model.vocab_size)
    return GenerationParams(
        sampling,
        body.limit(),
        stop=tuple(body.stop or (body.options.stops if body.options is not None else ())),
        stop_token_ids=_stop_token_ids(body, model),
        keeps_stop=body.keeps_stop(),
        cache_prompt=body.cache_prompt is not False,
        is_volatile=body.store is False or body.prompt_cache_retention in IN_MEMORY,
        priority=_priority(body),
        ignore_eos=body.ignore_eos is True,
        grammar=_grammar(body),
    )


def refuse_lone_stream_options(body: GenerationBody) -> None:
    """Raises ApiError (400) for stream options without a stream."""
    if body.stream_options is not None and body.stream_options.model_fields_set and body.stream is not True:
        message = "stream_options: they are for streams only, and stream is not true"
        raise ApiError(Code.INVALID_VALUE, message, "stream_options")


def _grammar(body: GenerationBody) -> AnswerGrammar | None:
    wanted = body.answer_grammar()
    if wanted is not None:
        refuse_going_on(body, f"an answer that {wanted.param} binds ends where nothing may follow")
    return wanted


def refuse_going_on(body: GenerationBody, why: str) -> None:
    """Raises ApiError (400) for fields that would keep an answer going which must end by itself."""
    wishes = {"ignore_eos": body.ignore_eos, "min_tokens": body.min_tokens, "min_new_tokens": body.min_new_tokens}
    for name, wish in wishes.items():
        if wish:
            raise ApiError(Code.INVALID_VALUE, f"{name}: {why}", name)


def _stop_token_ids(body: GenerationBody, model: ServedModel) -> frozenset[int]:
    check_token_ids(body.stop_token_ids or (), model.vocab_size, "stop_token_ids")
    return frozenset(body.stop_token_ids or ())


def _sampling(body: GenerationBody, model: ServedModel) -> SamplingParams:
    given: dict[str, Any] = {name: getattr(body, name) for name in SAMPLING_FIELDS if getattr(body, name) is not None}
    if body.repeat_penalty is not None:
        given["repetition_penalty"] = _one_repetition_penalty(body.repeat_penalty, body.repetition_penalty)
    if given.get("seed") == RANDOM_SEED:
        given["seed"] = None
    if "top_k" in given and not 0 < given["top_k"] < model.vocab_size:
        given["top_k"] = 0
    if "top_n_sigma" in given:
        given["top_n_sigma"] = max(given["top_n_sigma"], 0.0)
    if given.get("top_p") == 0:
        # A mass of 0 leaves only the likeliest token.
        given |= {"top_p": 1.0, "top_k": 1}
    given["min_tokens"] = body.least()
    given["top_logprobs"] = body.num_top_logprobs()
    if body.logit_bias:
        given["logit_bias"] = _biases(body.logit_bias, model.vocab_size)
    if body.allowed_token_ids:
        check_token_ids(body.allowed_token_ids, model.vocab_size, "allowed_token_ids")
        given["allowed_token_ids"] = tuple(body.allowed_token_ids)
    if body.bad_words:
        given["bad_words"] = bad_word_tokens(body.bad_words, model)
    if given.get("dry_multiplier"):
        given["dry_breakers"] = breaker_tokens(body.dry_sequence_breakers, model)
    return replace(options_sampling(body.options or Options(), model), **given)


def _with_one_window(sampling: SamplingParams, body: GenerationBody) -> SamplingParams:
    """Returns the sampling with the window of mlx-lm's fields; raises ApiError if they differ."""
    in_force = [name for name, (penalty, off) in _WINDOWS.items() if getattr(sampling, penalty) != off]
    named = {name: getattr(body, name) for name in ("repeat_last_n", *in_force) if getattr(body, name) is not None}
    for name, value in named.items():
        window = next(iter(named.values()))
        if value != window:
            message = f"{name}: all penalties look at the same tokens here, and {value} is not {window}"
            raise ApiError(Code.INVALID_VALUE, message, name)
    return replace(sampling, repeat_last_n=value) if named else sampling


def _one_repetition_penalty(value: float, other: float | None) -> float:
    if other not in (None, value):
        message = f"repeat_penalty: it is another name of repetition_penalty, and {value} is not {other}"
        raise ApiError(Code.INVALID_VALUE, message, "repeat_penalty")
    return value


def _biases(biases: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    for key in biases:
        if not _TOKEN_ID.fullmatch(key) or int(key) >= vocab_size:
            message = f"logit_bias: {key[:40]!r} is no token id from 0 to {vocab_size - 1}"
            raise ApiError(Code.INVALID_VALUE, message, "logit_bias")
    return tuple((int(key), bias) for key, bias in biases.items())


def _priority(body: GenerationBody) -> Priority:
    is_background = body.priority == "background" or (body.priority is None and body.service_tier == BACKGROUND_TIER)
    return Priority.BACKGROUND if is_background else Priority.INTERACTIVE
