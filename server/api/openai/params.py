"""Reads the engine's parameters from a body of OpenAI's."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.inference.sampling_params import SamplingParams, check
from server.api.errors import wrong
from server.api.openai.types import GenerationBody, bad_word_tokens, breaker_tokens
from server.api.params import AnswerGrammar, GenerationParams, changed_sampling, check_token_ids, options_sampling
from server.engine.request import Priority
from server.pool.served import ServedModel

BACKGROUND_TIER = "flex"
DEFAULT_TIER = "default"
IN_MEMORY = ("in_memory", "in-memory")
"""Values of `prompt_cache_retention` that keep state off the disk."""
_WINDOWS = {
    "repetition_context_size": ("repetition_penalty", 1.0),
    "presence_context_size": ("presence_penalty", 0.0),
    "frequency_context_size": ("frequency_penalty", 0.0),
}
"""mlx-lm's windows: each one's penalty, and the value that switches the penalty off."""
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)


def read_params(body: GenerationBody, model: ServedModel) -> GenerationParams:
    """A checked body's parameters; raises ApiError or InvalidParameter."""
    sampling = _with_one_window(_sampling(body, model), body)
    check(sampling, model.vocab_size)
    check_token_ids(body.stop_token_ids or (), model.vocab_size, "stop_token_ids")
    is_background = body.priority == "background" or (body.priority is None and body.service_tier == BACKGROUND_TIER)
    return GenerationParams(
        sampling,
        body.limit(),
        stop=tuple(body.stop or (body.options.stops if body.options is not None else ())),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        keeps_stop=body.include_stop_str_in_output is True or body.no_stop_trim is True,
        cache_prompt=body.cache_prompt is not False,
        speculates=body.speculate is not False and body.speculative_n_max != 0,
        is_volatile=body.store is False or body.prompt_cache_retention in IN_MEMORY,
        priority=Priority.BACKGROUND if is_background else Priority.INTERACTIVE,
        ignore_eos=body.ignore_eos is True,
        grammar=_grammar(body),
    )


def refuse_lone_stream_options(body: GenerationBody) -> None:
    """Raises ApiError (400) for stream options without a stream."""
    if body.stream_options is not None and body.stream_options.model_fields_set and body.stream is not True:
        raise wrong("stream_options", "they are for streams only, and stream is not true")


def _grammar(body: GenerationBody) -> AnswerGrammar | None:
    wanted = body.answer_grammar()
    if wanted is not None:
        refuse_going_on(body, f"an answer that {wanted.param} binds ends where nothing may follow")
    return wanted


def refuse_going_on(body: GenerationBody, why: str) -> None:
    """Raises ApiError (400) for fields that continue an answer."""
    wishes = {"ignore_eos": body.ignore_eos, "min_tokens": body.min_tokens, "min_new_tokens": body.min_new_tokens}
    for name, wish in wishes.items():
        if wish:
            raise wrong(name, why)


def _sampling(body: GenerationBody, model: ServedModel) -> SamplingParams:
    given: dict[str, Any] = {"min_tokens": body.least(), "top_logprobs": body.num_top_logprobs()}
    value, other = body.repeat_penalty, body.repetition_penalty
    if value is not None:
        if other not in (None, value):
            raise wrong("repeat_penalty", f"it is another name of repetition_penalty, and {value} is not {other}")
        given["repetition_penalty"] = value
    if body.logit_bias:
        given["logit_bias"] = _biases(body.logit_bias, model.vocab_size)
    if body.allowed_token_ids:
        check_token_ids(body.allowed_token_ids, model.vocab_size, "allowed_token_ids")
        given["allowed_token_ids"] = tuple(body.allowed_token_ids)
    if body.bad_words:
        given["bad_words"] = bad_word_tokens(body.bad_words, model)
    if body.dry_multiplier:
        given["dry_breakers"] = breaker_tokens(body.dry_sequence_breakers, model)
    return changed_sampling(options_sampling(body.options, model), body, model.vocab_size, **given)


def _with_one_window(sampling: SamplingParams, body: GenerationBody) -> SamplingParams:
    """The sampling with mlx-lm's windows, which must be one; raises ApiError."""
    in_force = [name for name, (penalty, off) in _WINDOWS.items() if getattr(sampling, penalty) != off]
    named = {name: getattr(body, name) for name in ("repeat_last_n", *in_force) if getattr(body, name) is not None}
    for name, value in named.items():
        window = next(iter(named.values()))
        if value != window:
            raise wrong(name, f"all penalties look at the same tokens here, and {value} is not {window}")
    return replace(sampling, repeat_last_n=value) if named else sampling


def _biases(biases: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    for key in biases:
        if not _TOKEN_ID.fullmatch(key) or int(key) >= vocab_size:
            raise wrong("logit_bias", f"{key[:40]!r} is no token id from 0 to {vocab_size - 1}")
    return tuple((int(key), bias) for key, bias in biases.items())
