"""Fields that requests for text share, whatever the dialect, and the parameters that they hold.

All are optional, and null means absent. A seed below 0 is none, `top_k` outside the vocabulary keeps all tokens, and
a nucleus of 0 is greedy.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from models.inference.sampling_params import MAX_REPEATED, MAX_WINDOW, NUMBERS, SamplingParams, check, settled
from models.store.stored_model import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS, WITHOUT_EFFECT
from server.api.binding import BoundBody
from server.api.bodies import BodyModel, Rules, Whole, as_whole, refused
from server.api.errors import wrong
from server.api.params import NO_LIMIT, GenerationParams, Limit, check_token_ids
from server.engine.request import LoopRule, Priority
from server.pool.served import ServedModel

logger = logging.getLogger(__name__)

_FEW = Field(max_length=MAX_STOP_STRINGS)
_WITHOUT_EMPTY = AfterValidator(lambda texts: [text for text in texts if text])
StopStrings = Annotated[list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]], _FEW]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
PenaltyValue = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
RepetitionPenalty = Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)]
Window = Annotated[Whole, Field(ge=-1, le=MAX_WINDOW)]
CacheSalt = Annotated[str, Field(max_length=256)]
"""Only requests with the same salt share state."""


class SampledBody(BodyModel):
    """Fields of OpenAI's bodies and Ollama's options."""

    temperature: Temperature | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: PenaltyValue | None = None
    frequency_penalty: PenaltyValue | None = None
    repeat_last_n: Window | None = None
    """Tokens that the penalties look at; -1 is all, 0 none."""


class Options(SampledBody):
    """Ollama's `options`."""

    num_predict: Annotated[Whole | None, AfterValidator(lambda most: most if most and most > 0 else None)] = None
    """0 and below mean no limit."""
    top_k: Whole | None = None
    """0 and below keep all tokens."""
    typical_p: Share | None = None
    """0 and 1 keep all tokens."""
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**63)] | None = None
    """Below 0 means no seed."""
    stop: Annotated[list[Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]], _FEW, _WITHOUT_EMPTY] | None = None

    def limit(self) -> Limit:
        """The most tokens, if the options say."""
        return Limit(self.num_predict, "options.num_predict")


IGNORED_OPTIONS = {"num_ctx", *WITHOUT_EFFECT}
"""Ollama's options that have no effect here."""


def _as_limit(value: Any) -> Any:
    """A limit, as a whole number; None for -1."""
    whole = as_whole(value)
    return None if whole == -1 else whole


def smallest_limit(body: BodyModel, *names: str) -> Limit:
    """The smallest of the limits that a body has under `names`."""
    given = (Limit(getattr(body, name), name) for name in names)
    return min((limit for limit in given if limit.tokens is not None), default=NO_LIMIT)


def _stop_strings(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    return [text for text in texts if text != ""] if isinstance(texts, list) else texts


def _priority(value: Any) -> Any:
    return None if value == 0 and not isinstance(value, bool) else value


class RepetitionDetection(BodyModel):
    """vLLM's `repetition_detection`."""

    max_pattern_size: Annotated[Whole, Field(ge=0, le=2048)] = 0
    """0 detects nothing."""
    min_pattern_size: Annotated[Whole, Field(ge=0)] = 0
    min_count: Annotated[Whole, Field(ge=0, le=1000)] = 0

    @model_validator(mode="after")
    def _check(self) -> "RepetitionDetection":
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError("min_pattern_size is above max_pattern_size")
        if self.max_pattern_size and self.min_count < 2:
            raise ValueError("min_count must be at least 2")
        return self

    def rule(self) -> LoopRule:
        """What ends an answer."""
        return LoopRule(self.max_pattern_size, self.min_pattern_size, self.min_count)


Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
_MinTokens = Annotated[Whole, Field(ge=0, lt=2**63)] | None
_Limit = Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(_as_limit)]
LimitOrZero = Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(_as_limit)]


class StreamOptions(BodyModel):
    """What a stream holds beside the text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Without effect."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: also send the counts so far in every chunk."""


class SharedBody(BodyModel):
    """Fields that the Responses API has, too."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    seed: Annotated[Whole, Field(ge=-1, lt=2**63)] | None = None
    """-1 means no seed."""
    session_id: str | None = None
    cache_prompt: bool | None = None
    """False: neither reuse nor keep this prompt's state."""
    speculate: bool | None = None
    cache_salt: CacheSalt | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    priority: Annotated[Literal["interactive", "background"] | None, BeforeValidator(_priority)] = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    store: bool | None = None


class SamplingBody(SampledBody, SharedBody):
    """How tokens are sampled, and what ends an answer; the Responses API has these, too."""

    top_k: Annotated[Whole, Field(ge=-1)] | None = None
    """-1 and 0 keep all tokens."""
    typical_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_n_sigma: Annotated[float, Field(ge=-1, le=100, allow_inf_nan=False)] | None = None
    """0 and below keep all tokens."""
    xtc_probability: Share | None = None
    xtc_threshold: Share | None = None
    repetition_penalty: RepetitionPenalty | None = None
    """`repeat_penalty` is another name; the two must not differ."""
    repetition_context_size: Window | None = None
    presence_context_size: Window | None = None
    frequency_context_size: Window | None = None
    """mlx-lm's windows; those of active penalties must not differ."""
    dry_multiplier: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    dry_base: Annotated[float, Field(ge=1, le=100, allow_inf_nan=False)] | None = None
    dry_allowed_length: Annotated[Whole, Field(ge=1, le=MAX_REPEATED)] | None = None
    dry_penalty_last_n: Window | None = None
    dry_sequence_breakers: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=64)] | None = None
    logit_bias: dict[str, Bias] | None = None
    allowed_token_ids: Annotated[list[int], Field(min_length=1)] | None = None
    bad_words: Annotated[list[Annotated[str, Field(max_length=128)]], Field(max_length=256)] | None = None
    """Texts excluded, as far as the answer spells them with the usual tokens."""
    stop: Annotated[StopStrings, BeforeValidator(_stop_strings)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=64)] | None = None


class GenerationBody(BoundBody, SamplingBody):
    """Fields of a request for text."""

    max_tokens: _Limit = None
    """-1 means no limit."""
    max_completion_tokens: _Limit = None
    max_new_tokens: _Limit = None
    n_predict: _Limit = None
    """Other names of `max_tokens`; the smallest counts."""
    speculative_n_max: Annotated[Whole, Field(ge=-1)] | None = Field(default=None, alias="speculative.n_max")
    n: Annotated[Whole, Field(ge=1)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_progress: bool | None = None
    """With `stream`: also send how much of the prompt is evaluated."""
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    """Another name of `include_stop_str_in_output`."""
    min_tokens: _MinTokens = None
    min_new_tokens: _MinTokens = None
    """Another name of `min_tokens`; the larger counts."""
    ignore_eos: bool | None = None
    repetition_detection: RepetitionDetection | None = None
    metadata: dict[str, Any] | None = None
    options: Options | None = None
    """Ollama's fields; those of the body itself take precedence."""

    def num_top_logprobs(self) -> int | None:
        """Likeliest tokens to send with each, if any."""
        return None

    def least(self) -> int:
        """The fewest tokens; raises ApiError if above the limit."""
        least, limit = max(self.min_tokens or 0, self.min_new_tokens or 0), self.limit().tokens
        if limit is not None and least > limit:
            param = "min_tokens" if self.min_tokens == least else "min_new_tokens"
            raise wrong(param, f"{least} tokens are more than the {limit} that the answer may have")
        return least

    def limit(self) -> Limit:
        """The most tokens, if the request says."""
        limit = smallest_limit(self, "max_tokens", "max_completion_tokens", "max_new_tokens", "n_predict")
        return limit if limit != NO_LIMIT or self.options is None else self.options.limit()


IN_BOTH: Rules = refused("""
    answers are bound by a JSON schema, a pattern, a list of choices or a grammar only: structural_tag
    all of the n answers are given, each sampled token by token: best_of=1 use_beam_search=false length_penalty=1
        do_sample=true
    there is no such sampler here: samplers custom_logit_processor top_a=0 tfs_z=1 mirostat=0 dynatemp_range=0
        min_keep=0 no_repeat_ngram_size=0 watermark=false watermarking=false logits_processors=[]
    an answer ends where the model ends it, at a text in stop, at a token, or at max_tokens: stop_regex=""|[]
        n_indent=0 t_max_predict_ms=0|-1
    special tokens are never part of the answer: skip_special_tokens=true
    prompts are never cut; what is too long is answered with an error: truncate_prompt_tokens truncate
        truncation="disabled" transforms=[]
    the prompt is made of messages and tools, or of prompt, and of nothing else: input input_ids inputs prompt_embeds
        role_mapping prompt_mode task system="" instructions="" template="" raw=false context=[] images=[]
        tool_prompt="" guideline="" safe_prompt=false session_params={} suffix=""
    its name here is n: n_cmpl=1
    its name here is max_tokens: num_predict max_output_tokens
    its name here is seed: random_seed
    its name here is cache_salt: extra_key
    fields stand in the body itself: parameters={} sampling_params={} extra_body={} vllm_xargs={}
    answers hold text, without data on single tokens or on the model's inner state: logprob_token_ids n_probs=0
        post_sampling_probs=false prompt_logprobs=0 top_n_tokens=0 details=false decoder_input_details=false
        return_hidden_states=false return_routed_experts=false return_prompt_token_ids=false return_tokens=false
        return_token_offsets=false
    answers have the same fields for everybody, and do not repeat the prompt: return_full_text=false
        return_prompt_text=false return_meta_info=false return_cached_tokens_details=false response_fields=[]
    the model runs as it was loaded, without adapters: lora_path adapter_id adapters lora=[]
    nothing is looked up or judged on the side: moderation web_search_options plugins=[] enable_search=false
""")

IN_TEXT: Rules = IN_BOTH | refused("""
    a plain completion has no template that could be told to think; send it to /v1/chat/completions: think
        thinking={} max_thinking_tokens=-1 thinking_budget=-1 thinking_budget_tokens=-1 thinking_token_budget=-1
        reasoning={} reasoning_budget=-1 reasoning_budget_tokens=-1
    what the model thinks is part of a completion's text: include_reasoning=true separate_reasoning=false
        stream_reasoning=true reasoning_format="none"|"auto"
    a prompt always begins with the model's first token, where it has one: add_special_tokens=true
    a plain completion has no messages, tools or template; send it to /v1/chat/completions: messages=[] tools=[]
        functions=[] documents=[] chat_template="" continue_final_message=false
""")

BACKGROUND_TIER = "flex"
IN_MEMORY = ("in_memory", "in-memory")
"""Values of `prompt_cache_retention` that keep state off the disk."""
_WINDOWS = {
    "repetition_context_size": ("repetition_penalty", 1.0),
    "presence_context_size": ("presence_penalty", 0.0),
    "frequency_context_size": ("frequency_penalty", 0.0),
}
"""mlx-lm's windows: each one's penalty, and the value that switches the penalty off."""
_BREAKERS = ("\n", ":", '"', "*")
"""DRY's default, that of llama.cpp."""
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)


def read_params(body: GenerationBody, model: ServedModel) -> GenerationParams:
    """A checked body's parameters; raises ApiError or InvalidParameter."""
    sampling = _with_one_window(_sampling(body, model), body)
    check_token_ids(body.stop_token_ids or (), model.vocab_size, "stop_token_ids")
    grammar = body.answer_grammar()
    if grammar is not None:
        refuse_going_on(body, f"an answer that {grammar.param} binds ends where nothing may follow")
    is_background = body.priority == "background" or (body.priority is None and body.service_tier == BACKGROUND_TIER)
    return GenerationParams(
        sampling=sampling,
        limit=body.limit(),
        stop=tuple(body.stop or (body.options is not None and body.options.stop) or ()),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        keeps_stop=body.include_stop_str_in_output is True or body.no_stop_trim is True,
        cache_prompt=body.cache_prompt is not False,
        speculates=body.speculate is not False and body.speculative_n_max != 0,
        is_volatile=body.store is False or body.prompt_cache_retention in IN_MEMORY,
        priority=Priority.BACKGROUND if is_background else Priority.INTERACTIVE,
        ignore_eos=body.ignore_eos is True,
        loops=None if body.repetition_detection is None else body.repetition_detection.rule(),
        grammar=grammar,
    )


def refuse_lone_stream_options(body: GenerationBody) -> None:
    """Raises ApiError (400) for stream options without a stream."""
    if body.stream_options is not None and body.stream_options.model_fields_set and body.stream is not True:
        raise wrong("stream_options", "they are for streams only, and stream is not true")


def refuse_going_on(body: GenerationBody, why: str) -> None:
    """Raises ApiError (400) for fields that continue an answer."""
    for name in ("ignore_eos", "min_tokens", "min_new_tokens"):
        if getattr(body, name):
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
        # Each text at a line's start and after a blank.
        forms = [form for text in body.bad_words for form in (text.lstrip(), " " + text.lstrip()) if text.strip()]
        sequences = dict.fromkeys(tuple(model.renderer.tokenize(form)) for form in forms)
        given["bad_words"] = tuple(ids for ids in sequences if ids and max(ids) < model.vocab_size)
    if body.dry_multiplier:
        given["dry_breakers"] = _breaker_tokens(body.dry_sequence_breakers, model)
    return changed_sampling(options_sampling(body.options, model), body, model.vocab_size, **given)


def _with_one_window(sampling: SamplingParams, body: GenerationBody) -> SamplingParams:
    """The sampling with mlx-lm's windows, which must be one; raises ApiError."""
    in_force = [name for name, (penalty, off) in _WINDOWS.items() if getattr(sampling, penalty) != off]
    named = {name: getattr(body, name) for name in ("repeat_last_n", *in_force) if getattr(body, name) is not None}
    for name, value in named.items():
        window = next(iter(named.values()))
        if value != window:
            raise wrong(name, f"all penalties have the same window here, and {value} is not {window}")
    return replace(sampling, repeat_last_n=value) if named else sampling


def _biases(biases: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    for key in biases:
        if not _TOKEN_ID.fullmatch(key) or int(key) >= vocab_size:
            raise wrong("logit_bias", f"{key[:40]!r} is no token id from 0 to {vocab_size - 1}")
    return tuple((int(key), bias) for key, bias in biases.items())


def _breaker_tokens(texts: Sequence[str] | None, model: ServedModel) -> tuple[int, ...]:
    """Sorted tokens that hold one of `texts`, or the last token of a text that none holds."""
    ids: set[int] = set()
    for text in _BREAKERS if texts is None else filter(None, texts):
        last = model.renderer.tokenize(text)[-1:]
        ids.update(model.tokens_containing(text) or [token for token in last if token < model.vocab_size])
    return tuple(sorted(ids))


def options_sampling(options: Options | None, model: ServedModel) -> SamplingParams:
    """The model's defaults, changed by the options; logs unknown ones."""
    if options is None:
        return model.sampling
    unknown = sorted((options.model_extra or {}).keys() - IGNORED_OPTIONS)
    if unknown:
        logger.warning("options without meaning here: %s", repr(unknown)[:500])
    return changed_sampling(model.sampling, options, model.vocab_size, repetition_penalty=options.repeat_penalty)


def changed_sampling(defaults: SamplingParams, body: BodyModel, vocab_size: int, **others: Any) -> SamplingParams:
    """`defaults`, changed by a body and `others`; None changes nothing. Raises InvalidParameter."""
    wishes = {**{name: getattr(body, name) for name in NUMBERS.keys() & type(body).model_fields.keys()}, **others}
    given = settled({name: value for name, value in wishes.items() if value is not None})
    if given.get("top_k", 0) >= vocab_size:
        given["top_k"] = 0
    sampling = replace(defaults, **given)
    check(sampling, vocab_size)
    return sampling
