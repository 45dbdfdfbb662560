"""Loads a model folder: weights, configuration, tokenizer. Never downloads, never runs code from the folder.

A folder that needs its own code (`auto_map`) is refused. The checksum takes each array as 32-bit words; a chunk's sum
of word × odd random multiplier, modulo 2^32, changes with nearly any change (multiply-shift hashing; Dietzfelbinger
et al., 1997), equally on every device. The checksum withstands no attacker.
"""

import contextlib
import hashlib
import io
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from transformers import PreTrainedTokenizerBase

from cache.layers.kinds import make_caches
from models import providers, weights
from models.errors import ModelBroken, ModelNotFound, brief, told_as
from models.formats import POOLING_FILE
from models.lora import AdapterSet
from models.mlx_lm_import import (
    TokenizerWrapper,
    get_total_parameters,
    load_model,
    load_tokenizer,
    quantize_model,
    save,
)
from models.mtp import MtpModule, load_mtp, tensors_of
from models.output.call_formats import HARMONY, CallFormat, find_call_format
from models.output.detokenizer import Detokenizer, markers
from models.output.pieces import HARMONY_REASONING, ReasoningFormat, find_reasoning_format
from models.precision import Precision, choose_precision, convert, parameters_of
from models.providers import Provider
from models.ranks import ONE_RANK, Ranks
from models.vision.loading import Vision, keep_vision, load_vision

logger = logging.getLogger(__name__)

_MAX_NAME: Final = 100
_MAX_REASON: Final = 300


def _check_code(config: dict[str, Any], folder: Path, name: str) -> None:
    """Refuses code of the folder without which its model or tokenizer cannot be loaded."""
    if config.get("model_file") is not None:
        code = brief(config["model_file"], _MAX_NAME)
        raise _needs_code(name, "config.json has the model built by", code, "a conversion without model_file")
    if not (folder / "tokenizer.json").is_file():
        _check_tokenizer_code(folder, name)


def _check_tokenizer_code(folder: Path, name: str) -> None:
    for file in ("tokenizer_config.json", "config.json"):
        code = _code_in(weights.read_json(folder / file).get("auto_map"), "AutoTokenizer")
        if code is not None:
            choice = "a conversion whose tokenizer.json says all, without auto_map in tokenizer_config.json"
            raise _needs_code(name, "its tokenizer is", code, choice)


def _needs_code(name: str, what: str, code: str, choice: str) -> ModelBroken:
    return ModelBroken(f"{name}: {what} code of the folder ({code}), which mlx-serve never runs; choose {choice}")


def _code_in(auto_map: Any, *kinds: str) -> str | None:
    """The code that `auto_map` names, if any; in its older form it is the tokenizer's."""
    named = auto_map if isinstance(auto_map, dict) else {"AutoTokenizer": auto_map}
    for kind in kinds:
        codes = named[kind] if isinstance(named.get(kind), list) else [named.get(kind)]
        for code in reversed(codes):
            if isinstance(code, str):
                return brief(code, _MAX_NAME)
    return None


@contextlib.contextmanager
def _explained(what: str, kinds: tuple[type[BaseException], ...] = (Exception, SystemExit)) -> Iterator[None]:
    """Raises ModelBroken for errors of others' code, which may raise anything for a wrong file."""
    try:
        yield
    except ModelBroken:
        raise
    except kinds as error:
        raise ModelBroken(f"{what}: {brief(str(error) or type(error).__name__, _MAX_REASON)}") from error


_CHUNK_WORDS: Final = 1 << 22
_WORD_BYTES: Final = 4
_SEED: Final = 20_26


def checksum(arrays: Iterable[tuple[str, mx.array]]) -> str:
    """16 hexadecimal digits that differ for other names, types, shapes or bytes."""
    multipliers = mx.array(np.random.default_rng(_SEED).integers(1 << 32, size=_CHUNK_WORDS, dtype=np.uint32) | 1)
    digest = hashlib.blake2b(digest_size=8)
    for name, array in sorted(arrays, key=lambda named: named[0]):
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(np.array(_chunk_sums(array, multipliers)).tobytes())
    return digest.hexdigest()


def _chunk_sums(array: mx.array, multipliers: mx.array) -> mx.array:
    """Uint32 `[num_chunks]`."""
    if array.size == 0:
        return mx.zeros(0, mx.uint32)
    words = _words(array)
    sums = []
    for start in range(0, words.size, _CHUNK_WORDS):
        chunk = words[start : start + _CHUNK_WORDS]
        sums.append(mx.sum(chunk * multipliers[: chunk.size]))
        # Evaluated at once: otherwise the products of all chunks of a large array would be in memory together.
        mx.eval(sums[-1])
    return mx.stack(sums)


def _words(array: mx.array) -> mx.array:
    flat = array.reshape(-1)
    if missing := -flat.nbytes % _WORD_BYTES:
        # In bytes the length of a large array would exceed the 32 bits of a shape.
        flat = mx.view(flat, mx.uint8 if flat.itemsize == 1 else mx.uint16)
        flat = mx.pad(flat, (0, missing // flat.itemsize))
    return mx.view(flat, mx.uint32)


DEFAULT_CONTEXT_TOKENS = 32_768
"""For configurations without a limit."""

_LIMIT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
_MAX_NORMALIZER_GROWTH = 64
_LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_decoder_layers")


@dataclass(frozen=True, eq=False)
class DraftModel:
    """A smaller model of the same tokens, ready to run."""

    name: str
    model: Module
    vocab_size: int


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to run, its weights evaluated. Any thread may use it, one at a time."""

    name: str
    path: Path
    model: Module
    """`model(tokens, cache=caches)` returns logits `[batch, num_tokens, vocab_size]`."""
    tokenizer: PreTrainedTokenizerBase
    tokenizer_wrapper: TokenizerWrapper
    reasoning_format: ReasoningFormat | None
    call_format: CallFormat | None
    detokenizer: Detokenizer
    config: dict[str, Any]
    context_tokens: int
    vocab_size: int
    """Width of the logits; may exceed the tokenizer's tokens."""
    eos_token_ids: frozenset[int]
    num_parameters: int
    """Counts the whole model, also where several machines divide it."""
    state_fingerprint: str
    """Differs where stored states must not mix: by weights, what drafts, precision, library versions."""
    precision: Precision = Precision.STORED
    adapters: AdapterSet | None = None
    mtp: MtpModule | None = None
    vision: Vision | None = None
    draft: DraftModel | None = None
    no_draft: str = ""
    """Why the draft model asked for does not draft."""

    @property
    def fingerprint(self) -> str:
        """As of `weights.fingerprint`."""
        return self.state_fingerprint.partition(" ")[0]

    @property
    def modules(self) -> list[Module]:
        """All with weights."""
        tower = None if self.vision is None else self.vision.tower
        parts = [self.model, self.mtp, tower, None if self.draft is None else self.draft.model]
        return [module for module in parts if module is not None]


def load(
    path: Path,
    name: str,
    *,
    max_float32_bytes: int | None = None,
    max_check_seconds: float = math.inf,
    with_mtp: bool = False,
    tell: Callable[[str], object] = lambda step: None,
    ranks: Ranks = ONE_RANK,
) -> LoadedModel:
    """Loads the model in the local folder `path`; blocks until all weights are in memory.

    With `max_float32_bytes`, weights get the types fastest on a CPU, see `models.precision`; with `with_mtp`, the MTP
    module too, if there is one that fits. Code that is not mlx-lm's is checked in `max_check_seconds`. Raises
    ModelNotFound and ModelBroken.
    """
    provider = check(path, name)
    if ranks.size > 1 and not provider.is_mlx_lm:
        raise ModelBroken(f"{name}: its code is of {provider}, and only mlx-lm's models are divided among machines")
    model, config, num_parameters, precision, weights_fingerprint = _read_model(
        path, name, provider, max_float32_bytes, tell, ranks
    )
    _check_code_of(provider, model, name, max_check_seconds, tell)
    mtp = _load_mtp(path, name, model, max_float32_bytes) if with_mtp else None
    tell("reading the tokenizer")
    return LoadedModel(
        name=name,
        path=path,
        model=model,
        **_text_parts(open_tokenizer(path, name, config), config),
        config=config,
        context_tokens=_context_tokens(config),
        vocab_size=_vocab_size(model, name),
        num_parameters=num_parameters,
        state_fingerprint=weights_fingerprint + ("" if mtp is None else f" mtp {checksum(parameters_of(mtp))}"),
        precision=precision,
        mtp=mtp,
    )


def _text_parts(wrapper: TokenizerWrapper, config: dict[str, Any]) -> dict[str, Any]:
    """The fields of `LoadedModel` about tokens and texts."""
    tokenizer = cast(PreTrainedTokenizerBase, wrapper._tokenizer)
    eos_token_ids, call_format = frozenset(_eos_token_ids(config, wrapper)), _call_format(wrapper)
    reasoning_format = _reasoning_format(wrapper, call_format)
    reasoning_markers = (reasoning_format.start, reasoning_format.end) if reasoning_format else ()
    visible = (*markers(wrapper), *reasoning_markers, *(() if call_format is None else call_format.markers))
    return {
        "tokenizer": tokenizer,
        "tokenizer_wrapper": wrapper,
        "detokenizer": Detokenizer(tokenizer, visible, eos_token_ids),
        "reasoning_format": reasoning_format,
        "call_format": call_format,
        "eos_token_ids": eos_token_ids,
    }


def with_draft(
    loaded: LoadedModel,
    path: Path,
    name: str,
    *,
    max_float32_bytes: int | None,
    max_check_seconds: float = math.inf,
    tell: Callable[[str], object],
) -> LoadedModel:
    """`loaded` with the draft model in `path`, or with why that cannot draft; raises like `load`."""
    provider = check(path, name)
    fault = _draft_fault(loaded, path, name)
    if fault is not None:
        logger.warning("%s does not draft for %s: %s", name, loaded.name, fault)
        return replace(loaded, no_draft=f"{name} does not draft: {fault}")
    model, _, _, _, fingerprint = _read_model(path, name, provider, max_float32_bytes, tell)
    _check_code_of(provider, model, name, max_check_seconds, tell)
    draft = DraftModel(name, model, _vocab_size(model, name))
    return replace(loaded, draft=draft, state_fingerprint=f"{loaded.state_fingerprint} draft {fingerprint}")


def with_vision(loaded: LoadedModel, max_image_tokens: int) -> LoadedModel:
    """`loaded` with its tower, if the folder has one; its layers are wrapped, so this comes last."""
    what = loaded.path, loaded.name, loaded.model, loaded.config, loaded.tokenizer
    vision = load_vision(*what, max_image_tokens)
    if vision is not None:
        convert(vision.tower, loaded.precision)
        mx.eval(vision.tower)
    return replace(loaded, vision=vision)


def _draft_fault(loaded: LoadedModel, path: Path, name: str) -> str | None:
    if makes_vectors(path):
        return "it makes vectors, not text"
    if weights.total_bytes(path) >= weights.total_bytes(loaded.path):
        return f"its weights are no smaller than those of {loaded.name}"
    ours, theirs = _tokens_of(loaded.tokenizer), _tokens_of(open_tokenizer(path, name, _load_config(path, name)))
    differing = sorted({text for text, _, _ in ours ^ theirs})
    if differing:
        return f"its tokenizer is another, by {len(differing)} tokens such as {brief(repr(differing[0]), _MAX_NAME)}"
    return None


def makes_vectors(path: Path) -> bool:
    """Whether a folder holds an embedding model."""
    return (path / "modules.json").is_file() or (path / POOLING_FILE).is_file()


def _tokens_of(tokenizer: Any) -> set[tuple[str, int, bool]]:
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {(text, token_id, token_id in special) for text, token_id in tokenizer.get_vocab().items()}


def check(path: Path, name: str) -> Provider:
    """Whose code the model runs on. Raises like `load`; reads little."""
    config = _load_config(path, name)
    _check_code(config, path, name)
    provider = _find_provider(config, path, name)
    _check_num_layers(config, weights.find_weight_files(path), name)
    return provider


def check_mtp(path: Path, name: str, file: Path) -> None:
    """Raises like `check` unless `file` holds an MTP module for the model."""
    model, _ = _build(path, name, check(path, name), lazy=True)
    if load_mtp(path, name, model, file) is None:
        raise ModelBroken(f"{name}: no MTP module of its family is known")


def read_config(path: Path) -> tuple[dict[str, Any], int]:
    """A folder's configuration and context in tokens; raises like `check`."""
    config = _load_config(path, path.name)
    return config, _context_tokens(config)


def convert_weights(
    path: Path, name: str, target: Path, bits: int | None, tell: Callable[[int, int], object]
) -> None:
    """Writes a model of the folder `path` into `target`, with `bits` for each weight or as it is stored.

    `tell` hears of the bytes that are ready, and of all. Raises like `load`.
    """
    model, config = _build(path, name, check(path, name), lazy=True)
    # Other errors are the disk's.
    with _explained(f"{name}: cannot be converted", (ValueError, KeyError, TypeError)):
        mtp = _load_mtp(path, name, model, None)
        if bits is not None:
            # The library prints.
            with contextlib.redirect_stdout(io.StringIO()):
                model, config = quantize_model(model, config, None, bits)
                mtp = mtp and quantize_model(mtp, {}, None, bits)[0]
        arrays = [array for _, array in parameters_of(model)]
        done_bytes, total_bytes = 0, sum(array.nbytes for array in arrays)
        for array in arrays:
            mx.eval(array)
            done_bytes += array.nbytes
            tell(done_bytes, total_bytes)
        save(target, path, model, open_tokenizer(path, name, config), config)
        keep_vision(path, target)
        if mtp is not None:
            mx.save_safetensors(str(target / weights.MTP_FILE), tensors_of(mtp))


def release(loaded: LoadedModel) -> None:
    """Frees a model's weights, whoever still refers to the model."""
    for owner in loaded.modules:
        for module in cast(list[Module], owner.modules()):  # type: ignore[no-untyped-call]
            module.clear()
    if loaded.adapters is not None:
        loaded.adapters.close()


def _call_format(wrapper: TokenizerWrapper) -> CallFormat | None:
    tokenizer = wrapper._tokenizer
    declared = tokenizer.init_kwargs.get("tool_parser_type")
    return find_call_format(tokenizer.get_vocab(), str(tokenizer.chat_template or ""), declared)


def _reasoning_format(wrapper: TokenizerWrapper, call_format: CallFormat | None) -> ReasoningFormat | None:
    tokenizer = wrapper._tokenizer
    form = find_reasoning_format(tokenizer.get_vocab(), str(tokenizer.chat_template or ""))
    if wrapper.has_thinking:
        form = ReasoningFormat(wrapper.think_start, wrapper.think_end)
    if call_format is HARMONY:
        form = HARMONY_REASONING
    if form is None:
        return None
    closing_ids = tuple(tokenizer.encode(form.closing, add_special_tokens=False))
    return replace(form, closing_ids=closing_ids, start_id=tokenizer.get_vocab().get(form.start))


def _load_config(path: Path, name: str) -> dict[str, Any]:
    if not path.is_dir():
        raise ModelNotFound(f"{name}: there is no folder {path}")
    # The libraries' own errors mislead.
    with told_as(ModelBroken, f"{path} is not readable"):
        files = [*path.iterdir()]
    for file in files:
        with told_as(ModelBroken, f"{file} is not readable"):
            if file.is_file():
                file.open("rb").close()
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"{name}: {path} has no config.json, so it is not a model")
    return weights.require_json(path / "config.json", name)


def _find_provider(config: dict[str, Any], path: Path, name: str) -> Provider:
    model_type = config.get("model_type")
    # The type becomes a module's name: some of mlx-lm's have a hyphen, none has a dot or a slash.
    if not isinstance(model_type, str) or not model_type.replace("-", "_").isidentifier():
        raise ModelBroken(f"{name}: config.json names no model_type, but {model_type!r}")
    with _explained(name, (providers.ProviderFault,)):
        provider = providers.find(model_type, path)
    if provider is not None:
        return provider
    unknown = f"{name}: model type {model_type!r} is not known to mlx-lm {version('mlx-lm')}"
    if need := providers.need_of(model_type):
        raise ModelBroken(f"{unknown}; {need}")
    code = _code_in(config.get("auto_map"), "AutoModelForCausalLM", "AutoModel", "AutoConfig")
    own = f", and the folder's own code for it ({code}) is never run; choose a model of a type that mlx-lm knows"
    raise ModelBroken(unknown if code is None else unknown + own)


def _check_num_layers(config: dict[str, Any], files: list[Path], name: str) -> None:
    """Refuses too many layers, which would be built before missing weights are noticed."""
    num_weights = sum(len(weights.read_header(file)) for file in files)
    for section in _sections(config):
        for key in _LAYER_KEYS:
            count = section.get(key)
            if isinstance(count, int | float) and count > num_weights:
                raise ModelBroken(f"{name}: config.json has {count} {key}, but the files hold {num_weights} weights")


def _build(path: Path, name: str, provider: Provider, *, lazy: bool = False) -> tuple[Module, dict[str, Any]]:
    """The model with its weights, and the configuration."""
    what, method = f"{name}: cannot be loaded", weights.quantization_method(path)
    if method is not None:
        what += f", since not every form of {method} is read; choose MLX weights, or unquantized ones"
    with _explained(what):
        model, config = load_model(path, lazy=lazy, get_model_classes=provider.get_classes)
    return model, config


def _read_model(
    path: Path,
    name: str,
    provider: Provider,
    max_float32_bytes: int | None,
    tell: Callable[[str], object],
    ranks: Ranks = ONE_RANK,
) -> tuple[Module, dict[str, Any], int, Precision, str]:
    """Model, configuration, parameters, precision, and the fingerprint of what the model's state depends on."""
    tell("reading weights")
    model, config = _build(path, name, provider, lazy=ranks.size > 1)
    num_parameters = int(get_total_parameters(model))
    ranks.divide(model, config, name)
    # Arrays that are no parameters (rotary frequencies, for one) are still lazy, and lazy arrays belong to their
    # thread.
    mx.eval(model)
    libraries = dict.fromkeys((f"mlx {version('mlx')}", f"mlx-lm {version('mlx-lm')}", provider.told))
    state = f"{weights.fingerprint(path)} {checksum(parameters_of(model))} {' '.join(libraries)}"
    precision = choose_precision(model, max_float32_bytes)
    convert(model, precision, lambda done, total: tell(f"making weights float32, {100 * done // total} %"))
    return (
        model,
        config,
        num_parameters,
        precision,
        state if precision is Precision.STORED else f"{state} {precision}",
    )


def _check_code_of(
    provider: Provider, model: Module, name: str, max_seconds: float, tell: Callable[[str], object]
) -> None:
    """Refuses a model whose code is not mlx-lm's and gives a wrong answer."""
    if provider.is_mlx_lm:
        return
    from models.inference.gate import Gate

    tell(f"checking the code of {provider.told}")
    with _explained(f"{name}: the model does not run by the code of {provider.told}"):
        fault = Gate(model, max_seconds).find_fault()
    if fault is not None:
        raise ModelBroken(f"{name}: refused, since the code of {provider.told} fails a check: {fault}")


def _load_mtp(path: Path, name: str, model: Module, max_float32_bytes: int | None) -> MtpModule | None:
    """Without one that fits, the model works all the same."""
    try:
        module = load_mtp(path, name, model)
    except ModelBroken as error:
        logger.warning("%s; it is left out", error)
        return None
    if module is not None:
        convert(module, choose_precision(module, max_float32_bytes))
    mx.eval(module)
    return module


def _check_normalizer(path: Path, name: str) -> None:
    """Refuses a tokenizer whose normalizer makes texts far longer."""
    raw = path.read_bytes() if path.is_file() else b""
    if b"Replace" not in raw and b"\\u00" not in raw:
        return
    growth, left = 1, [json.loads(raw).get("normalizer")]
    while left and growth <= _MAX_NORMALIZER_GROWTH:
        step = left.pop() or {}
        left += step.get("normalizers", ())
        if step.get("type") == "Replace":
            pattern = step["pattern"].get("String")
            growth *= 1 + len(step["content"]) if not pattern else max(1, -(-len(step["content"]) // len(pattern)))
    if growth > _MAX_NORMALIZER_GROWTH:
        raise ModelBroken(f"{name}: {path} makes texts more than {_MAX_NORMALIZER_GROWTH} times as long (normalizer)")


def open_tokenizer(path: Path, name: str, config: dict[str, Any]) -> TokenizerWrapper:
    """The folder's tokenizer and template; raises ModelBroken."""
    # Without these two, a folder could ask on the terminal to run its own code, or load files from elsewhere.
    extra = {"trust_remote_code": False, "local_files_only": True}
    with _explained(f"{name}: its tokenizer cannot be loaded"):
        _check_normalizer(path / "tokenizer.json", name)
        try:
            return load_tokenizer(path, extra, eos_token_ids=config.get("eos_token_id"))
        except Exception:
            _check_tokenizer_code(path, name)
            raise


def _vocab_size(model: Any, name: str) -> int:
    with _explained(f"{name}: the model does not run"):
        logits = model(mx.array([[0, 0]]), cache=make_caches(model))
        mx.eval(logits)  # a device may lack what the weights need, for several tokens only, too
        return int(logits.shape[-1])


def _context_tokens(config: dict[str, Any]) -> int:
    limits = (section[key] for section in _sections(config) for key in _LIMIT_KEYS if section.get(key))
    return int(next(limits, DEFAULT_CONTEXT_TOKENS))


def _eos_token_ids(config: dict[str, Any], wrapper: TokenizerWrapper) -> Iterator[int]:
    declared = [section.get("eos_token_id") for section in _sections(config)]
    for ids in (*declared, wrapper.eos_token_ids, wrapper._tokenizer.eos_token_id):
        if isinstance(ids, int):
            yield ids
        elif isinstance(ids, Iterable):
            yield from (token_id for token_id in ids if isinstance(token_id, int))


def _sections(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield config
    for key in ("text_config", "language_config", "llm_config"):
        if isinstance(config.get(key), dict):
            yield config[key]
