"""What several tests of the HTTP side watch."""

from typing import Any

import pytest

from server.api import answer


@pytest.fixture
def num_ahead(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows by one with each turn that was evaluated ahead."""
    done: list[None] = []
    evaluate_ahead = answer._evaluate_ahead

    async def watch(*args: Any) -> None:
        await evaluate_ahead(*args)
        done.append(None)

    monkeypatch.setattr(answer, "_evaluate_ahead", watch)
    return done
