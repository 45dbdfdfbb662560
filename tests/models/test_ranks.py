"""What ranks, as threads, agree on: plain data, and what their probes find."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from models.inference import probe
from models.inference.probe import Form, Probe
from models.ranks import Ranks
from tests.support import loopback, tiny_models


def test_ranks_agree() -> None:
    def agreed(group: loopback.Group) -> list[Any]:
        ranks = Ranks(group)
        return [ranks.any(group.rank() == 1), ranks.any(False), ranks.gather(group.rank()), ranks.share(group.rank())]

    with loopback.loopback() as run:
        assert run(3, agreed) == [[True, False, [0, 1, 2], 0]] * 3


def _suspicious(patch: pytest.MonkeyPatch) -> None:
    """Rows on a head differ on another rank, a little, as heads do whose numbers are others."""
    find, trial = probe._differences, probe._TRIALS[Form.HEADS]

    def differences(traces: Any, eps: float, alone: Any, in_chunks: Any) -> dict[Any, float]:
        is_suspect = loopback.rank() and len(traces) == len(trial)
        return {next(iter(alone)): 1.0} if is_suspect else find(traces, eps, alone, in_chunks)

    patch.setattr(probe, "_differences", differences)


def _alone(patch: pytest.MonkeyPatch) -> None:
    _suspicious(patch)
    patch.setattr(Ranks, "any", lambda self, value: value)


def _by_clock(patch: pytest.MonkeyPatch) -> None:
    """A slow rank has no time for what the others try."""
    patch.setattr(Probe, "left_seconds", property(lambda self: self.max_seconds - self._spent_seconds))


@pytest.mark.parametrize(
    ("break_it", "expected", "is_same"),
    [
        (lambda patch: None, Form.HEADS, True),
        (_suspicious, Form.GROUPS, True),
        (_alone, Form.GROUPS, False),
        (_by_clock, Form.HEADS, False),
    ],
)
def test_what_one_rank_suspects_all_do(
    break_it: Callable[[pytest.MonkeyPatch], None], expected: Form, is_same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe that is slow on one rank, and sees its rows differ there, finds the same on all."""
    break_it(monkeypatch)
    if not is_same:  # a rank waits in vain for one that goes another way
        monkeypatch.setattr(loopback, "BARRIER_SECONDS", 5.0)

    def probed(group: loopback.Group) -> Form:
        clock = itertools.count(0.0, 10.0 * loopback.rank()).__next__
        own = Probe(loopback.part_of("qwen3", group), tiny_models.VOCAB, clock, ranks=Ranks(group))
        return own.find_form()[0]

    with loopback.loopback() as run:
        assert (run(2, probed) == [expected] * 2) == is_same


@pytest.mark.parametrize("error", [RuntimeError("no memory"), MemoryError("no memory")])
def test_an_error_of_one_machine_while_a_model_is_tried_out_leaves_nobody_waiting(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = probe._Rows.together

    def failing(self: Any, trial: Any) -> Any:
        if loopback.rank():
            raise error
        return together(self, trial)

    monkeypatch.setattr(probe._Rows, "together", failing)
    monkeypatch.setattr(loopback, "BARRIER_SECONDS", 5.0)

    def probed(group: loopback.Group) -> tuple[Form, str]:
        return Probe(loopback.part_of("qwen3", group), tiny_models.VOCAB, ranks=Ranks(group)).find_form()

    with loopback.loopback() as run, pytest.raises(type(error), match="no memory"):
        run(2, probed)


def test_what_no_machine_can_call_is_found_by_all() -> None:
    def probed(group: loopback.Group) -> tuple[Form, str]:
        return Probe(loopback.part_of("deepseek_v32", group), tiny_models.VOCAB, ranks=Ranks(group)).find_form()

    with loopback.loopback() as run:
        (form, why), other = run(2, probed)
    assert (form, why) == other and form is Form.ALONE and "AttributeError" in why
