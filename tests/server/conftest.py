"""Tests of the server open many servers of a few models: each kind of model is probed once in a process.

The result depends on shapes and classes, not on weights; tests of `models/` prove that it is right.
"""

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import pytest
from mlx.utils import tree_flatten

from models.inference.abilities import Trials
from models.inference.drafters import Drafter
from models.inference.probe import Probe

_FOUND: dict[Hashable, Any] = {}


def _kind_of(model: Any) -> Hashable:
    if isinstance(model, Drafter):
        parts = (getattr(model, name, None) for name in ("_model", "_draft", "_module"))
        return type(model), *(_kind_of(part) for part in parts if part is not None)
    leaves: Any = tree_flatten(model.parameters())
    return (
        type(model),
        repr(getattr(model, "args", None)),
        tuple((path, leaf.shape, leaf.dtype) for path, leaf in leaves),
    )


def _once(find: Callable[..., Any]) -> Callable[..., Any]:
    def found(probe: Any, *words: Hashable, **options: Hashable) -> Any:
        key = (find.__name__, _kind_of(probe.model), words, *options.items())
        if key not in _FOUND:
            _FOUND[key] = find(probe, *words, **options)
        return _FOUND[key]

    return found


def _measured_once(measured: Callable[..., Any]) -> Callable[..., Any]:
    def found(trials: Any, measure: Any) -> Any:
        key = (getattr(measure, "func", measure).__qualname__, _kind_of(trials._whole))
        if key not in _FOUND:
            _FOUND[key] = measured(trials, measure)
        return _FOUND[key]

    return found


@pytest.fixture(autouse=True, scope="module")
def _probes_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for find in (Probe.find_form, Probe.find_feed_fault, Probe.find_flat_fault):
            patch.setattr(Probe, find.__name__, _once(find))
        patch.setattr(Trials, "_measure", _measured_once(Trials._measure))
        yield
