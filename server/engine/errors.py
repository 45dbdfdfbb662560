"""Errors of the engine. None of them ends it.

EngineError
├── QueueFull          too many requests wait; come back after `retry_after_seconds`
├── EngineStopped      the server is shutting down
├── OutOfMemory        the request cannot be held even when everything else is paged out
└── StepFailed         the model raised while this sequence was evaluated
"""


class EngineError(Exception):
    """Base of all errors the engine reports."""


class QueueFull(EngineError):
    """Too many requests wait already."""

    def __init__(self, num_waiting: int, retry_after_seconds: int) -> None:
        super().__init__(f"{num_waiting} requests are waiting already; try again in {retry_after_seconds} s")
        self.retry_after_seconds = retry_after_seconds


class EngineStopped(EngineError):
    """The engine takes no more requests."""


class OutOfMemory(EngineError):
    """The request's state cannot be held within the budget."""

    retry_after_seconds = 5


class StepFailed(EngineError):
    """The model failed on this sequence; other sequences went on."""
