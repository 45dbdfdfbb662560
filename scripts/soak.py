"""A differential soak: random requests on tiny real models, every answer compared with an uncached one.

Usage: python -m scripts.soak [--requests N] [--seed S] [--model NAME]…

Conversations branch, are edited, repeated and cancelled; memory and disk are too small for all of them, and for some
requests memory hardly holds the prompt; prompts part inside edges that are as long as a window, or by one shorter or
longer, sometimes with nothing else in memory that could go; now and then the process "restarts" on the same folder,
with or without time to write. Answers are greedy tokens: one wrong row of state shows in them. At the end memory must
be back at its floor. Exits with status 1 at the first difference.

With `--cache-bits` stored state is rounded, in pieces at random times. Then every row and matrix that is restored
must be, bit for bit, what was evaluated for these tokens, or what rounding makes of that.
"""

import argparse
import gc
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from cache.budget import Ledger
from cache.disk import connector
from cache.disk.folder import DiskStore
from cache.disk.tier import DiskTier
from cache.layers.kinds import RowKind, kind_of, leaves_of
from cache.layers.layout import EXACT, Layout, StoredForm
from cache.layers.state import Rounded
from cache.lease import Lease
from cache.prefix_cache import PrefixCache
from cache.slots import CacheRequest, Lookup
from cache.snapshots import RestorePoint, RestorePointKind
from tests.support import cache_driver, tiny_models

# isort: split
from mlx_lm.models.cache import make_prompt_cache

MODELS = ("llama", "gemma3", "llama_swa", "gpt_oss", "llama4", "qwen3_5", "mamba2", "falcon_h1")
"""Attention; three with sliding windows; chunks; recurrent layers beside attention, alone, and in each layer."""
NUM_GENERATED = 3
MAX_PROMPT = 160
SYSTEM_TOKENS = 30
MEMORY_PROMPTS, DISK_PROMPTS = 4, 24
"""What memory and disk can hold, in prompts of the longest kind."""
FLOOR_SLACK_BYTES = 1 << 20
"""What MLX may hold more at the end than at the start."""


class Difference(Exception):
    """An answer was not what an uncached run gives."""


class Evaluated:
    """All state that was ever evaluated, by the tokens up to its own."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, bytes], list[mx.array]] = {}
        self._whole: dict[tuple[int, bytes], list[mx.array]] = {}

    def add(self, caches: Any, tokens: Any, num_new: int) -> None:
        """Takes what the last tokens added."""
        for place, rows, _ in _rows_of(caches):
            for back in range(1, min(num_new, rows.shape[2]) + 1):
                key = place, tokens[: len(tokens) - back + 1].tobytes()
                self._rows.setdefault(key, []).append(rows[:, :, rows.shape[2] - back])
        for place, state in _whole_of(caches):
            self._whole.setdefault((place, tokens.tobytes()), []).append(state)
        mx.eval(self._rows, self._whole)

    def check(self, caches: Any, tokens: Any) -> int:
        """How many tokens were restored from rounded state; raises Difference for state that is none of these."""
        rounded = set[int]()
        for place, rows, can_round in _rows_of(caches):
            for back in range(1, rows.shape[2] + 1):
                known = self._rows.get((place, tokens[: len(tokens) - back + 1].tobytes()), [])
                if _form_of(rows[:, :, rows.shape[2] - back], known, can_round=can_round):
                    rounded.add(back)
        for place, state in _whole_of(caches):
            if _form_of(state, self._whole.get((place, tokens.tobytes()), []), can_round=True):
                rounded |= set(range(1, len(tokens) + 1))
        return len(rounded)


def _form_of(restored: mx.array, known: list[mx.array], *, can_round: bool) -> bool:
    """Whether state was rounded."""
    if any(mx.array_equal(restored, one) for one in known):
        return False
    groups = [one[:, :, None] if one.ndim == 3 else one for one in known]
    if can_round and any(mx.array_equal(restored.flatten(), Rounded.of(one).exact().flatten()) for one in groups):
        return True
    raise Difference(f"state of shape {restored.shape} was restored that is none of the {len(known)} evaluated")


def _rows_of(caches: Any) -> Iterator[tuple[int, mx.array, bool]]:
    """Yields the place of each component of layers with rows, the rows, and whether rows may be rounded."""
    for layer, cache in enumerate(leaves_of(caches)):
        kind = kind_of(cache)
        if isinstance(kind, RowKind) and kind.length(cache):
            for part, rows in enumerate(kind.arrays(cache)):
                yield 8 * layer + part, rows, not kind.window and Rounded.fits(rows)


def _whole_of(caches: Any) -> Iterator[tuple[int, mx.array]]:
    for layer, cache in enumerate(leaves_of(caches)):
        states = cache.cache if kind_of(cache).is_merged else []
        yield from ((8 * layer + part, state) for part, state in enumerate(states) if state is not None)


class Soak:
    """One model, its cache, and what has been said so far."""

    def __init__(self, name: str, seed: int, folder: Path, form: StoredForm = EXACT) -> None:
        self._form, self._evaluated = form, Evaluated()
        self.counts: Counter[str] = Counter()
        self._rng = random.Random(f"{name}/{seed}")
        self._model: Any = tiny_models.build(name) if form.is_exact else tiny_models.build_wide(name)
        self._folder = folder
        self._known: list[list[int]] = [self._tokens(SYSTEM_TOKENS)]
        self._edges: list[tuple[list[int], int, int]] = []
        self._logits: Any = None
        self._open()

    def run(self, num_requests: int) -> None:
        """Runs so many requests; raises Difference."""
        for _ in range(num_requests):
            chance = self._rng.random()
            if chance < 0.02:
                self._restart(writes=chance < 0.01)
            elif chance < 0.05:
                self._rest()
            if chance > 0.8:
                self._press_alone()
            else:
                self._request()
        self.counts["evictions"] += self._cache.memory.num_evictions
        self._cache.end(10)

    def _open(self) -> None:
        caches = list(make_prompt_cache(self._model))
        self._evaluate(caches, np.ones(MAX_PROMPT, np.int32))
        num_bytes = sum(cache.nbytes for cache in caches)
        store = DiskStore(self._folder, "soak")
        tier = DiskTier(store, budget_bytes=DISK_PROMPTS * num_bytes, max_in_flight_bytes=1 << 20)
        self._cache = PrefixCache(
            lambda: list(make_prompt_cache(self._model)),
            num_slots=self._rng.choice((1, 2)),
            budget_bytes=MEMORY_PROMPTS * num_bytes,
            layout=Layout(make_prompt_cache(self._model), form=self._form),
            disk=tier,
        )
        self._cache.layout.calibrate(caches)
        self._tier = tier
        self._budget_bytes = self._cache.ledger.budget_bytes

    def _restart(self, *, writes: bool) -> None:
        self.counts["restarts"] += 1
        self.counts["evictions"] += self._cache.memory.num_evictions
        if writes:
            self._cache.end(10)
        else:
            self._tier.close()
        self._open()

    def _rest(self) -> None:
        self.counts["rests"] += 1
        for _ in self._cache.save():
            pass

    def _request(self) -> None:
        is_inside = bool(self._edges) and self._rng.random() < 0.3
        base, cut = self._inside_edge() if is_inside else self._base()
        prompt = [*base[:cut][:MAX_PROMPT], *self._tokens(self._rng.randrange(1, 30))]
        points = [RestorePoint(SYSTEM_TOKENS, RestorePointKind.SYSTEM_END), *self._edge(prompt)]
        self._press(len(prompt), is_pressed=is_inside or self._rng.random() < 0.3)
        self._ask(prompt, points, session_id=str(cut))

    def _press_alone(self) -> None:
        """Asks twice with nothing else in the cache: what must go for the second prompt is what it goes on from."""
        self._cache.clear()
        head, edge = tiny_models.WINDOW, tiny_models.WINDOW + self._rng.randrange(-1, 2)
        story = self._tokens(head + edge + 1)
        self._ledger.budget_bytes = self._budget_bytes
        self._ask(story, [RestorePoint(head, RestorePointKind.EXPLICIT)], session_id="alone")
        prompt = [*story[: head + self._rng.randrange(1, edge)], *self._tokens(9)]
        self._press(len(prompt), is_pressed=True)
        self._ask(prompt, [], session_id=self._rng.choice(("alone", "another")))

    def _ask(self, prompt: list[int], points: list[RestorePoint], *, session_id: str) -> None:
        tokens = np.array(prompt, np.int32)
        self._cache.memory.round_stored(self._rng.choice((0, 3, 20, 1000)))
        lease = self._cache.begin(
            CacheRequest(Lookup(tokens), restore_points=points, expected_tokens=NUM_GENERATED, session_id=session_id)
        )
        assert lease is not None, "nothing else runs, yet there is no slot"
        self.counts["hit tokens"] += lease.hit_tokens
        self.counts["prompt tokens"] += len(prompt)
        self.counts[f"from {lease.tier}"] += 1
        if not self._form.is_exact:
            self._compare(lease, prompt)
            return
        if self._rng.random() < 0.1:
            self.counts["cancelled"] += 1
            cache_driver.prefill(lease, tokens, self._evaluate, stop_at=self._rng.randrange(1, len(prompt) + 1))
            lease.close()
            return
        cache_driver.prefill(lease, tokens, self._evaluate)
        reply = self._decode(lease.caches, prompt[-1], lease.append)
        lease.close()
        self._cache.check()
        if reply != self._cold(prompt):
            raise Difference(f"request {self.counts.total()}: {lease.hit_tokens} of {len(prompt)} from {lease.tier}")
        self._known.append([*prompt, *reply])

    def _compare(self, lease: Lease, prompt: list[int]) -> None:
        """Goes on with a lease whose restored state is compared with all that was evaluated."""
        tokens, done = np.array(prompt, np.int32), lease.hit_tokens
        num_rounded = self._evaluated.check(lease.caches, tokens[:done]) if done else 0
        if num_rounded > lease.rounded_tokens:
            raise Difference(f"{num_rounded} tokens were rounded, {lease.rounded_tokens} are told of")
        self.counts["rounded tokens"] += num_rounded

        def evaluate(caches: Any, chunk: Any) -> None:
            nonlocal done
            self._evaluate(caches, chunk)
            done += len(chunk)
            self._evaluated.add(caches, tokens[:done], len(chunk))

        cache_driver.prefill(lease, tokens, evaluate)
        lease.close()
        self._cache.check()
        self._known.append(prompt)

    def _base(self) -> tuple[list[int], int]:
        """Returns tokens to go on from, and how many of them."""
        base = self._rng.choice(self._known[-40:])
        return base, len(base) if self._rng.random() < 0.6 else self._rng.randrange(1, len(base) + 1)

    def _inside_edge(self) -> tuple[list[int], int]:
        """Returns the same, so that the next prompt parts inside one of the last edges that `_edge` made."""
        base, start, stop = self._rng.choice(self._edges[-2:])
        return base, self._rng.randrange(start + 1, stop)

    def _edge(self, prompt: list[int]) -> list[RestorePoint]:
        """Returns the two ends of an edge about as long as a window, for some of the prompts."""
        num_tokens = tiny_models.WINDOW + self._rng.randrange(-1, 2)
        if len(prompt) <= num_tokens + 1 or self._rng.random() < 0.5:
            return []
        start = self._rng.randrange(1, len(prompt) - num_tokens)
        self._edges.append((prompt, start, start + num_tokens))
        return [RestorePoint(offset, RestorePointKind.BRANCH) for offset in (start, start + num_tokens)]

    @property
    def _ledger(self) -> Ledger:
        return self._cache.ledger

    def _press(self, num_tokens: int, *, is_pressed: bool) -> None:
        """Leaves a request the whole budget, or what it needs and a share of what is held: then something must go."""
        ledger = self._ledger
        needed = self._cache.layout.bytes_for(num_tokens + NUM_GENERATED)
        spare = self._rng.randrange(max(1, ledger.charged_bytes))
        ledger.budget_bytes = needed + spare if is_pressed else self._budget_bytes

    def _cold(self, prompt: list[int]) -> list[int]:
        caches = make_prompt_cache(self._model)
        self._evaluate(caches, np.array(prompt[:-1], np.int32))
        return self._decode(caches, prompt[-1], lambda token: None)

    def _decode(self, caches: Any, token: int, record: Any) -> list[int]:
        reply: list[int] = []
        while len(reply) < NUM_GENERATED:
            self._evaluate(caches, np.array([token], np.int32))
            record(token)
            token = int(np.argmax(np.array(self._logits)))
            reply.append(token)
        return reply

    def _evaluate(self, caches: Any, tokens: Any) -> None:
        if len(tokens):
            self._logits = self._model(mx.array(tokens)[None], cache=list(caches))[0, -1]
            mx.eval(self._logits, [cache.state for cache in caches])

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(1, tiny_models.VOCAB) for _ in range(count)]


def soak(name: str, num_requests: int, seed: int, form: StoredForm = EXACT) -> bool:
    """Soaks one model and prints what happened; whether memory came back to its floor."""
    began = time.monotonic()
    tiny_models.build(name)
    gc.collect()
    mx.clear_cache()
    floor = mx.get_active_memory()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        run = Soak(name, seed, Path(folder), form)
        run.run(num_requests)
        counts = run.counts
    del run
    gc.collect()
    mx.clear_cache()
    growth = mx.get_active_memory() - floor
    print(f"{name}: {num_requests} requests, {dict(counts)}, {growth} bytes left, {time.monotonic() - began:.0f} s")
    return growth <= FLOOR_SLACK_BYTES


def main() -> int:
    """Runs the program; returns its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=500, help="for each model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", action="append", choices=tiny_models.NAMES, help="may be repeated")
    parser.add_argument("--cache-bits", action="store_true", help="stored state in 8 bits")
    options = parser.parse_args()
    form = StoredForm(rows=True, recurrent=True) if options.cache_bits else EXACT
    connector.MIN_RESTORE_TOKENS = 8
    try:
        is_level = [soak(name, options.requests, options.seed, form) for name in options.model or MODELS]
    except Difference as error:
        print(f"a wrong answer: {error}", file=sys.stderr)
        return 1
    return 0 if all(is_level) else 1


if __name__ == "__main__":
    sys.exit(main())
