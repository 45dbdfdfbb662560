"""Errors of the engine. None of them ends it.

EngineError
├── QueueFull          too many requests wait; come back after `retry_after_seconds`
├── EngineStopped      the server is shutting down
├── PromptTooLarge     the request's state can never be held within the budget
├── OutOfMemory        there is no memory for the request now; come back after `retry_after_seconds`
├── AnswerUnbound      the answer's grammar cannot be followed any further
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


class PromptTooLarge(EngineError):
    """The request's state is larger than the whole budget."""


class OutOfMemory(EngineError):
    """There is no memory for the request, and nothing left to give up for it."""

    retry_after_seconds = 5


class AnswerUnbound(EngineError):
    """An answer's grammar cannot be followed any further."""

    param = None

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; ask for a shorter answer or for a simpler grammar")


class StepFailed(EngineError):
    """The model failed on this sequence; other sequences went on."""


_NO_MEMORY = ("unable to allocate", "out of memory", "outofmemory", "insufficient memory", "[metal::malloc]")


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error of the device or the machine is a lack of memory; MLX has no class for it."""
    return isinstance(error, MemoryError) or any(text in str(error).lower() for text in _NO_MEMORY)
