"""Checks which architectures may store state in 8 bits, and that restoring twice gives what restoring once gives.

Usage: python -m scripts.architectures.rounding [NAME]…

Tiny models with seeded weights, their heads as wide as a group of rounded numbers where the configuration allows it.
Exits with status 1 at the first architecture whose state drifts.
"""

import argparse
import sys
from collections import Counter
from typing import Any

from cache.layers.kinds import make_caches
from cache.layers.layout import Layout, StoredForm
from cache.layers.state import arrays_in
from models.inference.probe import Probe
from scripts.architectures.configs import NOT_BUILT, config, names
from tests.support import tiny_models

# isort: split
import mlx.core as mx

NUM_TOKENS = 90
NUM_GENERATED = 24


def restored(model: Any, layout: Layout, caches: list[Any], num_tokens: int) -> list[Any]:
    """Fresh layer caches with the state of `caches`, as it is stored."""
    fresh = make_caches(model)
    (rows,) = layout.cut_spans(caches, [(0, num_tokens)])
    layout.load_spans(fresh, [layout.rounded(rows)], keep=0, offset=num_tokens, capacity=num_tokens)
    if layout.window:
        start = max(layout.window_start(caches, num_tokens), num_tokens - layout.window)
        layout.load_windows(fresh, [layout.cut_window(caches, start, num_tokens)], num_tokens)
    layout.put_recurrent(fresh, layout.rounded_recurrent(layout.take_recurrent(caches)))
    return fresh


def tokens_of(model: Any, caches: list[Any], token: int, forced: list[int] | None = None) -> list[int]:
    """The likeliest token after each, of `forced` ones or its own."""
    found = list[int]()
    for number in range(NUM_GENERATED):
        found.append(int(mx.argmax(model(mx.array([[token]]), cache=caches)[0, -1])))
        token = found[-1] if forced is None else forced[number]
    return found


def check(name: str) -> tuple[StoredForm, int]:
    """What may be rounded, and how many greedy tokens differ; raises AssertionError for state that drifts."""
    model: Any = tiny_models.make(tiny_models.widened(config(name)))
    form = Probe(model, tiny_models.VOCAB).find_stored_form()
    prompt = mx.random.randint(1, tiny_models.VOCAB, (1, NUM_TOKENS), key=mx.random.key(1))
    caches = make_caches(model)
    model(prompt, cache=caches)
    mx.eval([cache.state for cache in caches])
    layout = Layout(make_caches(model), form=form)
    layout.calibrate(caches)
    once = restored(model, layout, caches, NUM_TOKENS)
    twice = restored(model, layout, once, NUM_TOKENS)
    pairs = zip(arrays_in(once), arrays_in(twice), strict=True)
    assert all(mx.array_equal(*pair) for pair in pairs), f"{name}: restored twice is not restored once"
    exact = tokens_of(model, caches, 7)
    return form, sum(left != right for left, right in zip(exact, tokens_of(model, once, 7, exact), strict=True))


def main() -> int:
    """Runs the program; returns its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="all, where none is named")
    counts, differing = Counter[str](), 0
    for name in parser.parse_args().names or [name for name in names() if name not in NOT_BUILT]:
        try:
            form, num_differing = check(name)
        except AssertionError as error:
            print(error, file=sys.stderr)
            return 1
        except Exception as error:
            print(f"{name}: not built with wide heads: {type(error).__name__}: {str(error)[:90]}", flush=True)
            counts["not built"] += 1
            continue
        counts["as it is" if form.is_exact else "in 8 bits"] += 1
        differing += num_differing
        print(f"{name}: {form.told}; {num_differing} of {NUM_GENERATED} tokens differ", flush=True)
    print(f"{dict(counts)}; {differing} of {NUM_GENERATED * (counts.total() - counts['not built'])} tokens differ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
