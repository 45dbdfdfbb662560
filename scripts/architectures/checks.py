"""What the server needs of a model, tried on one tiny model through the engine's worker."""

import tempfile
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from cache.disk import connector
from cache.disk.folder import DiskStore
from cache.disk.tier import DiskTier
from models import providers
from models.inference.probe import Form
from models.inference.runner import Runner
from models.inference.sampling_params import SamplingParams
from models.loader import load
from models.mlx_lm_import import load_model
from models.providers import Provider
from tests.support import tiny_models
from tests.support.engine_driver import Collected, Harness

# isort: split
from mlx_lm.models.cache import make_prompt_cache

NUM_GENERATED = 6
GREEDY = SamplingParams(temperature=0.0)
LOADED_TOLERANCE = 1e-4
"""Logits of the loaded model may differ so much from those of the model that was written."""
LENGTHS = (5, 18, 41, 77)
"""Prompts that are answered together: shorter and longer than the sliding window."""


class Difference(Exception):
    """An answer, or the way to it, was not what it must be."""


class Subject:
    """One tiny model and what it answers without a cache."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.model: Any = self.make()
        self._rng = np.random.default_rng(tiny_models.SEED)
        connector.MIN_RESTORE_TOKENS = 8

    @cached_property
    def runner(self) -> Runner:
        """The server's runner of the model."""
        return Runner(self.model, vocab_size=tiny_models.VOCAB)

    def make(self) -> Any:
        """Returns a model whose weights no loader has changed."""
        return tiny_models.make(self.config, self.provider.get_classes)

    @cached_property
    def provider(self) -> Provider:
        """Whose code it runs on."""
        provider = providers.find(self.config["model_type"], Path("no folder"))
        assert provider is not None, "a provider is installed"
        return provider

    def worker(self, **options: Any) -> Harness:
        """Returns a worker with an empty cache."""
        return Harness(runner=self.runner, **options)

    def prompt(self, num_tokens: int) -> list[int]:
        """Returns a random prompt."""
        return [int(token) for token in self._rng.integers(1, tiny_models.VOCAB, num_tokens)]

    def cold(self, prompt: Sequence[int]) -> list[int]:
        """Returns the greedy answer to a prompt that is evaluated in one piece, without a cache of ours."""
        caches, answer = make_prompt_cache(self.model), list[int]()
        tokens = list(prompt)
        for _ in range(NUM_GENERATED):
            logits = self.model(mx.array(tokens)[None], cache=caches)[0, -1]
            tokens = [int(np.argmax(np.array(logits)))]
            answer.extend(tokens)
        return answer

    def ask(self, worker: Harness, prompt: Sequence[int], **fields: Any) -> Collected:
        """Has a worker answer a prompt alone; raises Difference unless the answer is the cold one."""
        sink = submit(worker, prompt, **fields)
        worker.run(sink)
        self.compare(sink, prompt)
        return sink

    def compare(self, sink: Collected, prompt: Sequence[int]) -> None:
        """Raises Difference unless a finished answer is the cold one."""
        if "error" in vars(sink.last):
            raise Difference(f"failed: {sink.last.error}")
        if sink.tokens != self.cold(prompt):
            raise Difference(f"another answer to {len(prompt)} tokens, {sink.started.hit_tokens} of them restored")


def submit(worker: Harness, prompt: Sequence[int], **fields: Any) -> Collected:
    """Submits a prompt whose greedy answer does not end early."""
    return worker.submit(prompt, max_tokens=NUM_GENERATED, ignore_eos=True, sampling=GREEDY, **fields)


def loads(subject: Subject) -> str:
    """Written as a folder and loaded as the server loads, it gives the same logits."""
    tokens = mx.array([subject.prompt(9)])
    with tempfile.TemporaryDirectory(prefix="architecture-") as folder:
        path = tiny_models.write_model(subject.model, subject.config, Path(folder) / "model")
        loaded: Any = load(path, "tiny").model
        difference = float(mx.abs(loaded(tokens) - _sanitized(subject)(tokens)).max())
    if not difference <= LOADED_TOLERANCE:
        raise Difference(f"its logits differ by {difference:.2g}")
    return "yes"


def restored(subject: Subject) -> str:
    """Going on from an answer, and forking inside a prompt, restores state and answers as without a cache."""
    worker, prompt = subject.worker(), subject.prompt(70)
    first = subject.ask(worker, prompt)
    turn = [*prompt, *first.tokens, *subject.prompt(20)]
    _require_hit(subject.ask(worker, turn, user_start=len(prompt)))
    subject.ask(worker, [*prompt[:40], *subject.prompt(20)])
    return "yes"


def together(subject: Subject) -> str:
    """Answers that are decoded at the same time are those that are decoded alone."""
    worker = subject.worker()
    prompts = [subject.prompt(length) for length in LENGTHS]
    sinks = [submit(worker, prompt, cache_prompt=False) for prompt in prompts]
    worker.run(*sinks)
    for sink, prompt in zip(sinks, prompts, strict=True):
        subject.compare(sink, prompt)
    return "row by row" if subject.runner.abilities.form is Form.ALONE else "in one batch"


def cancelled(subject: Subject) -> str:
    """A prompt whose first request was cancelled half-way is answered rightly."""
    worker, prompt = subject.worker(), subject.prompt(77)
    sink = submit(worker, prompt, request_id="first")
    worker.step(3)
    worker.worker.cancel("first")
    worker.run(sink)
    subject.ask(worker, prompt)
    return "yes"


def paged(subject: Subject) -> str:
    """A conversation that lost its slot to another comes back from memory."""
    worker = subject.worker(num_slots=1)
    first, other = subject.prompt(50), subject.prompt(30)
    tokens = subject.ask(worker, first).tokens
    subject.ask(worker, other)
    again = subject.ask(worker, [*first, *tokens, *subject.prompt(9)])
    _require_hit(again)
    if again.started.tier != "memory":
        raise Difference(f"it came back from {again.started.tier}")
    return "yes"


def stored(subject: Subject) -> str:
    """A conversation comes back from disk after a restart."""
    prompt = subject.prompt(60)
    with tempfile.TemporaryDirectory(prefix="architecture-") as folder:
        worker = subject.worker(disk=_open_disk(folder))
        tokens = subject.ask(worker, prompt).tokens
        worker.prefix_cache.end(30)
        worker = subject.worker(disk=_open_disk(folder))
        again = subject.ask(worker, [*prompt, *tokens, *subject.prompt(9)])
        worker.prefix_cache.end(30)
    _require_hit(again)
    if again.started.tier != "disk":
        raise Difference(f"it came back from {again.started.tier}")
    return "yes"


def quantized(subject: Subject) -> str:
    """Quantized, written and loaded, it gives the same logits, bit for bit."""
    tokens = mx.array([subject.prompt(9)])
    for mode, group_size, bits in (("affine", 32, 4), ("affine", 32, 8), *_MODES):
        model = _sanitized(subject)
        quantize(model, group_size, bits, mode=mode, class_predicate=partial(_can_pack, group_size))
        with tempfile.TemporaryDirectory(prefix="architecture-") as folder:
            packed = {"quantization": {"group_size": group_size, "bits": bits, "mode": mode}}
            path = tiny_models.write_model(model, subject.config | packed, Path(folder) / "model")
            loaded, _ = load_model(path, get_model_classes=subject.provider.get_classes)
            if not mx.array_equal(loaded(tokens), model(tokens)):
                raise Difference(f"in {mode} {bits} bit its logits differ")
    return "yes"


_MODES = (("mxfp4", 32, 4), ("nvfp4", 16, 4), ("mxfp8", 32, 8))


def _can_pack(group_size: int, path: str, layer: Any) -> bool:
    return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % group_size == 0


CHECKS: dict[str, Callable[[Subject], str]] = {
    "loads": loads,
    "restored = cold": restored,
    "together = alone": together,
    "cancelled": cancelled,
    "paged": paged,
    "disk": stored,
}
VLM_CHECKS = {**CHECKS, "quantized": quantized}


def _sanitized(subject: Subject) -> Any:
    """Returns the model with weights as mlx-lm changes them when it loads some, as by giving them a length."""
    if not hasattr(subject.model, "sanitize"):
        return subject.model
    model = subject.make()
    model.load_weights(list(model.sanitize(dict(tree_flatten(subject.model.parameters()))).items()))
    return model


def _open_disk(folder: str) -> DiskTier:
    return DiskTier(DiskStore(Path(folder), "tiny"), budget_bytes=1 << 30, max_in_flight_bytes=1 << 26)


def _require_hit(sink: Collected) -> None:
    if not sink.started.hit_tokens:
        raise Difference("nothing was restored")
