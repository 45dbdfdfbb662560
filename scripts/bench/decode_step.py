"""One decode step of the bare runner, for benchmarks that measure it without an engine."""

from collections.abc import Sequence

from models.inference.runner import DecodeRow, DecodeStep, Runner


def launch(runner: Runner, rows: Sequence[DecodeRow], previous: DecodeStep | None) -> DecodeStep:
    """Prepares a step and starts it."""
    step = runner.prepare(rows, previous)
    runner.start(step)
    return step
