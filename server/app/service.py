"""From settings to a loaded model and its engine."""

import contextlib
import copy
import json
import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from cache.budget import UNBOUNDED_BYTES
from cache.layers.kinds import make_caches
from cache.layers.layout import Layout
from models import weights
from models.adapter import parse_adapter
from models.errors import EmbeddingUnsupported, InvalidParameter, ModelError, ModelNotFound, told_as
from models.formats import EmbeddingFormat, read_embedding_format, read_rerank_format
from models.inference.drafters import drafter_of
from models.inference.grammar import GrammarCompiler
from models.inference.sampling_params import SamplingParams
from models.inference.sampling_params import check as check_sampling
from models.loader import (
    LoadedModel,
    check,
    load,
    makes_vectors,
    open_tokenizer,
    read_config,
    release,
    with_draft,
    with_vision,
)
from models.mlx_lm_import import set_wired_limit
from models.names import find_stored, model_id, resolve, suggest_smaller
from models.output.pieces import ReasoningFormat
from models.precision import Precision, parameters_of, seconds_per_token
from models.prompt.chat_template import ChatRenderer
from models.ranks import ONE_RANK, Ranks
from models.texts import size_text
from models.vision.loading import find_images, placeholder_of
from models.vision.towers import Images
from server.app import memory_budget
from server.app.config import ServerConfig, StartError, parse_cache_bits
from server.app.memory_budget import Claim, Machine, MemoryPlan, read_machine
from server.engine.engine import CALIBRATION_TOKENS, Engine, EngineConfig, longest_chunk
from server.engine.ranks import LeadingRank
from server.pool.catalog import stored_source
from server.pool.members import Around, Member
from server.pool.memory import PoolMemory
from server.pool.names import ModelSource, ModelTooLarge
from server.pool.served import ListedModel, ModelFacts, ServedModel, architecture_facts

logger = logging.getLogger(__name__)

FLOAT32_SHARE = 0.5
"""Share of all memory for weights and state that float32 weights may take."""

_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


LARGEST_REST_BYTES = 64 << 20
"""Memory beside the weights that cannot hold state."""


class Wiring:
    """Keeps weights in memory, which macOS 15 or later would page out when memory is nearly full.

    MLX wires whatever buffers fit under a limit, and is known to panic macOS where wired buffers come and go while
    several streams run. So the limit is the size of the weights, and rises only while nothing runs and there is
    nothing but weights: no state is ever wired. For any thread, one at a time.
    """

    def __init__(self, machine: Machine, *, is_wanted: bool) -> None:
        is_new = (int(platform.mac_ver()[0].partition(".")[0] or 0)) >= 15
        self._largest_bytes = (machine.recommended_bytes or 0) if is_wanted and is_new else 0
        self.wired_bytes = 0

    @property
    def is_possible(self) -> bool:
        return self._largest_bytes > 0

    def update(self, weights_bytes: int, *, is_quiet: bool) -> None:
        """Wires all loaded weights if nothing runs (`is_quiet`); unwires unloaded ones in any case."""
        wanted_bytes = min(weights_bytes, self._largest_bytes)
        if wanted_bytes > self.wired_bytes:
            mx.clear_cache()
            if not is_quiet or mx.get_active_memory() - weights_bytes > LARGEST_REST_BYTES:
                logger.info("%s of weights stay wired: beside them there is state", size_text(self.wired_bytes))
                return
        if wanted_bytes != self.wired_bytes:
            set_wired_limit(wanted_bytes)
            self.wired_bytes = wanted_bytes


@dataclass(frozen=True, eq=False)
class Service:
    """The first model, its engine not started, and facts for the report."""

    opener: "ServiceOpener"
    """Loads others, and this one again."""
    opened: Member
    loaded: LoadedModel
    memory: MemoryPlan
    seconds_per_token: float | None
    """Measured on one matrix; None on a GPU."""
    wiring: Wiring
    asked_for: ServedModel
    """The model under the name that was asked for."""
    machines: Sequence[tuple[str, int, int]]
    """Each machine that holds a part of the model: name, bytes of weights, and bytes that the state leaves free."""

    def start(self) -> None:
        """Starts the engine, and wires the weights. Raises its errors."""
        self.engine.start()
        self.wiring.update(self.memory.weights_bytes, is_quiet=True)

    @property
    def model(self) -> ServedModel:
        return self.opened.model

    @property
    def engine(self) -> Engine:
        return self.opened.engine


def open_service(
    config: ServerConfig,
    others: Sequence[Claim] = (),
    tell: Callable[[str], object] = lambda step: None,
    ranks: Ranks = ONE_RANK,
    leader: LeadingRank | None = None,
) -> Service:
    """Loads the first configured model, blocking; with several `ranks`, this one's part, at the same time on all.

    Raises ModelError, and StartError for a model or a budget that this machine cannot hold.
    """
    source, machine = source_of(config.models[0]), read_machine(mx.device_info())
    memory, float32_bytes = pool_memory(config, machine, others), find_float32_bytes(machine, others)
    stored_bytes = _stored_bytes(source, config) // ranks.size
    _check_weights_fit(config.models[0], stored_bytes, memory_budget.largest_weights_bytes(machine), ranks.size)
    loaded = _load(source, config, float32_bytes, tell, ranks)
    plan = _plan(config, machine, loaded, memory, others)
    if ranks.size > 1:
        # For good: another machine cannot know what makes way here.
        plan = replace(plan, budget_bytes=min(ranks.gather(plan.budget_bytes)), most_bytes=0)
        config = replace(config, cache_memory_bytes=plan.budget_bytes)
        memory = pool_memory(config, machine, others)
    _bound_pool(memory_budget.choose_pool_bytes(plan.budget_bytes))
    around, make_engine = Around((), plan.budget_bytes), partial(Engine.for_model, ranks=ranks, leader=leader)
    opened = _opened(source, loaded, config, plan.weights_bytes, around, make_engine)
    return Service(
        ServiceOpener(config, memory, float32_bytes, source.id),
        opened,
        loaded,
        plan,
        seconds_per_token=None if _is_on_gpu() else seconds_per_token(loaded.model, _active_share(loaded.config)),
        wiring=Wiring(machine, is_wanted=config.wire_weights),
        asked_for=opened.served(source),
        machines=ranks.gather((platform.node(), plan.weights_bytes, plan.rest_bytes)),
    )


def find_float32_bytes(machine: Machine, others: Sequence[Claim]) -> int | None:
    """The most for float32 weights, None on a GPU. For all of a server's life: state fits one precision."""
    left_bytes = memory_budget.usable_bytes(machine) - sum(claim.least_bytes for claim in others)
    return None if _is_on_gpu() else int(max(left_bytes, 0) * FLOAT32_SHARE)


def pool_memory(config: ServerConfig, machine: Machine, others: Sequence[Claim]) -> PoolMemory:
    """One server's limits, beside others."""
    if config.cache_memory_bytes is not None:
        return PoolMemory(machine.memory_bytes, config.cache_memory_bytes)
    left_bytes = max(memory_budget.usable_bytes(machine) - sum(claim.memory_bytes for claim in others), 0)
    largest_bytes = memory_budget.largest_weights_bytes(machine)
    smallest_bytes = memory_budget.SMALLEST_BUDGET_BYTES
    most_bytes = max(memory_budget.largest_state_bytes(machine), smallest_bytes)
    return PoolMemory(left_bytes, None, largest_bytes, smallest_bytes, most_bytes)


@dataclass(frozen=True)
class ServiceOpener:
    """Loads models one at a time, on any thread."""

    config: ServerConfig
    memory: PoolMemory
    float32_bytes: int | None
    adapted_id: str = ""
    """The model with adapters: what its configured name means may change while the server runs."""

    def measure(self, source: ModelSource) -> int:
        """As `Opener.measure`: the stored size."""
        check(source.path, source.id)
        return _stored_bytes(source, self.config)

    def open(self, source: ModelSource, around: Around, tell: Callable[[str], object]) -> Member:
        """The model, its engine running.

        Raises ModelError, and ModelTooLarge where the weights take more than measured.
        """
        config = self.config if source.id == self.adapted_id else replace(self.config, adapters=())
        float32_bytes = self.float32_bytes
        if float32_bytes is not None:
            float32_bytes = min(float32_bytes, self.memory.largest_weights_bytes(around.weights))
        try:
            loaded = _load(source, config, float32_bytes, tell)
            try:
                weights_bytes = _weights_bytes(loaded)
                if not self.memory.fits([*around.weights, weights_bytes]):
                    raise ModelTooLarge(f"{source.id} takes {size_text(weights_bytes)} in memory, which is not there")
                opened = _opened(source, loaded, config, weights_bytes, around)
                tell("trying it out")
                opened.engine.start()
                return opened
            except BaseException:
                _release(loaded)
                raise
        finally:
            # A thread that ends with its own MLX streams can abort the process at its end.
            mx.synchronize()
            mx.clear_streams()

    def describe(self, source: ModelSource) -> ListedModel:
        """As `Opener.describe`."""
        parent_id = None if source.name == source.id else source.id
        try:
            config, limit = read_config(source.path)
            created = int((source.path / "config.json").stat().st_mtime)
            facts = ModelFacts(stored_bytes=weights.total_bytes(source.path), **architecture_facts(config))
        except (ModelError, OSError):
            return ListedModel(source.name, parent_id=parent_id)
        context_tokens = min(self.config.context_tokens or limit, limit, source.defaults.context_tokens or limit)
        sees = find_images(source.path, config, _max_image_tokens()) is not None
        return ListedModel(source.name, created, context_tokens, facts, parent_id=parent_id, has_tower=sees)


def _load(
    source: ModelSource,
    config: ServerConfig,
    float32_bytes: int | None,
    tell: Callable[[str], object],
    ranks: Ranks = ONE_RANK,
) -> LoadedModel:
    options: dict[str, Any] = {"max_check_seconds": config.provider_check_seconds, "tell": tell}
    with_mtp = config.speculate == "auto" and ranks.size == 1
    if float32_bytes is not None:
        float32_bytes = min(ranks.gather(float32_bytes))
    loaded = load(source.path, source.id, max_float32_bytes=float32_bytes, with_mtp=with_mtp, ranks=ranks, **options)
    if ranks.size > 1:
        logger.info("%s is divided among %d machines: no images, no MTP module", source.id, ranks.size)
        return loaded
    try:
        draft = _draft_source(source, config)
        if draft is not None:
            left_bytes = None if float32_bytes is None else max(float32_bytes - _weights_bytes(loaded), 0)
            loaded = with_draft(loaded, draft.path, draft.name, max_float32_bytes=left_bytes, **options)
        return with_vision(_with_adapters(loaded, config, tell), config.max_image_tokens or _max_image_tokens())
    except BaseException:
        _release(loaded)
        raise


def _max_image_tokens() -> int:
    """Larger images are scaled down: a CPU takes a second for every few tokens of a tower of usual size."""
    return 4096 if _is_on_gpu() else 256


def _draft_source(source: ModelSource, config: ServerConfig) -> ModelSource | None:
    """The model that is to draft for another; none for itself, nor for one that says nothing."""
    if config.draft_model is None or makes_vectors(source.path):
        return None
    with told_as(ModelNotFound, "--speculate", ModelNotFound):
        draft = source_of(config.draft_model)
    return None if draft.path == source.path else draft


def _stored_bytes(source: ModelSource, config: ServerConfig) -> int:
    """Bytes of a model's files and its draft model's, which must be smaller."""
    own_bytes, draft = weights.total_bytes(source.path), _draft_source(source, config)
    draft_bytes = 0 if draft is None else weights.total_bytes(draft.path)
    return own_bytes + (draft_bytes if draft_bytes < own_bytes else 0)


def _check_weights_fit(name: str, weights_bytes: int, limit_bytes: int, num_machines: int) -> None:
    if weights_bytes <= limit_bytes:
        return
    smaller = suggest_smaller(name, limit_bytes)
    advice = f"; {smaller} would fit: mlx-serve pull {smaller}" if smaller is not None else ""
    room = f"this machine has memory for {size_text(max(limit_bytes, 0))} of weights"
    each = f" on each of {num_machines} machines" if num_machines > 1 else ""
    raise StartError(f"the weights of {name} take {size_text(weights_bytes)}{each}, and {room}{advice}")


def _plan(
    config: ServerConfig, machine: Machine, loaded: LoadedModel, memory: PoolMemory, others: Sequence[Claim]
) -> MemoryPlan:
    weights_bytes, useful_bytes = _weights_bytes(loaded), _useful_bytes(loaded, config)
    budget_bytes = min(memory.for_state([weights_bytes]), useful_bytes)
    others_bytes, most_bytes = sum(claim.memory_bytes for claim in others), 0
    if config.cache_memory_bytes is None:
        most_bytes = memory_budget.choose_most_bytes(machine, weights_bytes, useful_bytes, others)
    plan = MemoryPlan(machine.memory_bytes, weights_bytes, budget_bytes, others_bytes, most_bytes)
    if weights_bytes + budget_bytes > machine.memory_bytes:
        usual = pool_memory(replace(config, cache_memory_bytes=None), machine, ()).for_state([weights_bytes])
        wanted = f"{size_text(budget_bytes)} of cache memory and {size_text(weights_bytes)} of weights"
        limit = f"the {size_text(machine.memory_bytes)} of this machine"
        raise StartError(f"{wanted} are more than {limit}; the default is {size_text(usual)}")
    return plan


def _context_tokens(loaded: LoadedModel, config: ServerConfig) -> int:
    return min(config.context_tokens or loaded.context_tokens, loaded.context_tokens)


def _useful_bytes(loaded: LoadedModel, config: ServerConfig) -> int:
    """A full context in each slot."""
    if config.cache_memory_bytes is not None:
        return UNBOUNDED_BYTES
    model: Any = drafter_of(loaded) or loaded.model
    caches = make_caches(model)
    layout = Layout(caches, longest_chunk(loaded, config.chunk_tokens))
    # Nothing is computed: the shapes of the state of a few tokens say enough.
    model(mx.zeros((1, CALIBRATION_TOKENS), mx.int32), cache=caches)
    layout.calibrate(caches)
    useful_bytes = config.slots * layout.bytes_for(_context_tokens(loaded, config))
    return max(useful_bytes, memory_budget.SMALLEST_BUDGET_BYTES)


def _engine_config(config: ServerConfig, budget_bytes: int, served: ServedModel) -> EngineConfig:
    return EngineConfig(
        max_slots=config.slots,
        budget_bytes=budget_bytes,
        context_tokens=served.context_tokens,
        chunk_tokens=config.chunk_tokens,
        shares_heads=config.share_heads,
        rounds_stored=any(fnmatchcase(served.id, parse_cache_bits(one)) for one in config.cache_bits),
        speculates=config.speculate != "off",
        max_waiting=config.max_waiting,
        disk_folder=Path(config.cache_dir).expanduser() if config.cache_disk_bytes is not None else None,
        disk_bytes=config.cache_disk_bytes or 0,
        disk_write_bytes_per_day=config.cache_disk_write_bytes_per_day,
    )


def _active_share(config: dict[str, Any]) -> float:
    """Share of the experts that a token goes through."""
    fields = {**config, **(config.get("text_config") or {})}
    active = fields.get("num_experts_per_tok")
    experts = fields.get("num_experts") or fields.get("num_local_experts") or fields.get("n_routed_experts")
    return active / experts if isinstance(active, int) and isinstance(experts, int) else 1.0


def _bound_pool(num_bytes: int) -> None:
    """Limits the bytes that MLX keeps; a lower limit stays."""
    mx.set_cache_limit(min(num_bytes, mx.set_cache_limit(num_bytes)))


def source_of(name: str) -> ModelSource:
    """A model of the command line, with its defaults. Raises ModelError."""
    stored = find_stored(name)
    if stored is not None:
        return stored_source(stored)
    return ModelSource(model_id(name), resolve(name))


def _opened(
    source: ModelSource,
    loaded: LoadedModel,
    config: ServerConfig,
    weights_bytes: int,
    around: Around,
    make_engine: Callable[..., Engine] = Engine.for_model,
) -> Member:
    tokenizer = loaded.tokenizer
    facts = ModelFacts(
        fingerprint=loaded.fingerprint,
        num_parameters=loaded.num_parameters,
        stored_bytes=weights.total_bytes(loaded.path),
        memory_bytes=weights_bytes,
        is_on_gpu=_is_on_gpu(),
        chat_template=str(tokenizer.chat_template or ""),
        bos_token=str(tokenizer.bos_token or ""),
        eos_token=str(tokenizer.eos_token or ""),
        **architecture_facts(loaded.config),
    )
    served = _served_model(loaded, facts, config)
    token_operations = 2 * facts.num_parameters * _active_share(loaded.config)
    engine_config = replace(_engine_config(config, around.budget_bytes, served), token_operations=token_operations)
    engine = make_engine(loaded, engine_config, around.kept)
    adapters = () if loaded.adapters is None else loaded.adapters.adapters
    variants = {adapter.name: served.variant(adapter) for adapter in adapters}
    release_weights, useful_bytes = partial(_release, loaded), _useful_bytes(loaded, config)
    return Member(source, served, engine, weights_bytes, release_weights, variants, useful_bytes)


def _served_model(loaded: LoadedModel, facts: ModelFacts, config: ServerConfig) -> ServedModel:
    context_tokens = _context_tokens(loaded, config)
    owner, vision = _template_owner(loaded.tokenizer_wrapper), loaded.vision
    renderer = ChatRenderer(owner, context_tokens - 1, None if vision is None else vision.placeholder)
    if vision is not None and not renderer.shows_pictures:
        logger.warning("%s sees no images: its chat template shows none", loaded.name)
        vision, renderer = None, ChatRenderer(owner, context_tokens - 1)
    served = ServedModel(
        id=loaded.name,
        renderer=renderer,
        token_texts=loaded.detokenizer,
        context_tokens=context_tokens,
        vocab_size=loaded.vocab_size,
        created=int(time.time()),
        call_format=loaded.call_format,
        reasoning_format=loaded.reasoning_format,
        opens_reasoning=_opens_reasoning(renderer, loaded.reasoning_format),
        grammars=GrammarCompiler(lambda: _describe_tokenizer(loaded), loaded.eos_token_ids),
        embedding=_embedding_format(loaded),
        reranking=read_rerank_format(
            loaded.name, loaded.config, facts.chat_template, loaded.tokenizer.get_vocab().get
        ),
        sampling=read_sampling(loaded.path / "generation_config.json", loaded.vocab_size),
        vision=vision,
        facts=facts,
    )
    if served.tool_calls == "text":
        logger.warning(
            "%s takes tools, but the format of its calls is not known: calls come as text, not as tool_calls",
            served.id,
        )
    return served


def _opens_reasoning(renderer: ChatRenderer, markers: ReasoningFormat | None) -> bool:
    asked = {"enable_thinking": True, "thinking": True}
    with contextlib.suppress(ModelError):
        text = renderer.render([{"role": "user", "content": "a"}], None, asked).text
        return markers is not None and markers.is_opened_by(text)
    return False


def _embedding_format(loaded: LoadedModel) -> EmbeddingFormat | None:
    tokenizer = loaded.tokenizer
    try:
        return read_embedding_format(loaded.path, tokenizer.encode(""), frozenset(tokenizer.all_special_ids))
    except EmbeddingUnsupported as error:
        logger.warning("%s makes no vectors: %s", loaded.name, error)
        return None


def _describe_tokenizer(loaded: LoadedModel) -> str:
    backend = copy.copy(loaded.tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return str(backend.to_str())


def open_renderer(name: str) -> tuple[ChatRenderer, Images | None]:
    """Template and tokenizer without weights, and how images are cut, if the model sees. Raises ModelError."""
    source = source_of(name)
    check(source.path, source.id)
    config, context_tokens = read_config(source.path)
    wrapper = open_tokenizer(source.path, source.id, config)
    images = find_images(source.path, config, _max_image_tokens())
    placeholder = None if images is None else placeholder_of(config, wrapper)
    renderer = ChatRenderer(_template_owner(wrapper), context_tokens - 1, placeholder)
    return renderer, images if renderer.shows_pictures else None


def _template_owner(wrapper: Any) -> Any:
    """The tokenizer, whose template decides whether to think.

    mlx-lm's wrapper asks every template to think; templates that are code of mlx-lm need it.
    """
    return wrapper._tokenizer if wrapper._tokenizer.chat_template else wrapper


def read_sampling(path: Path, vocab_size: int) -> SamplingParams:
    """What a model's makers recommend, else usual defaults."""
    try:
        recommended: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        given = {key: recommended[key] for key in _SAMPLING_KEYS if recommended.get(key) is not None}
        if recommended.get("do_sample") is False:
            given["temperature"] = 0.0
        params = SamplingParams(**given)
        check_sampling(params, vocab_size)
        return params
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, AttributeError, InvalidParameter) as error:
        logger.warning("%s is not used: %s", path, error)
    return SamplingParams()


def _is_on_gpu() -> bool:
    return mx.default_device().type != mx.cpu


def _release(loaded: LoadedModel) -> None:
    release(loaded)
    mx.clear_cache()


def _weights_bytes(loaded: LoadedModel) -> int:
    own_bytes = sum(array.nbytes for module in loaded.modules for _, array in parameters_of(module))
    return own_bytes + (loaded.adapters.num_bytes if loaded.adapters is not None else 0)


def _with_adapters(loaded: LoadedModel, config: ServerConfig, tell: Callable[[str], object]) -> LoadedModel:
    if not config.adapters:
        return loaded
    # Imports all of mlx-lm's training.
    from models.lora_files import attach

    tell("reading adapters")
    is_converted = loaded.precision is not Precision.STORED
    adapters = attach(loaded.model, list(map(parse_adapter, config.adapters)), as_float32=is_converted)
    return replace(loaded, adapters=adapters)
