"""Tests that are coroutines."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

Fixtures = ParamSpec("Fixtures")


def awaited(test: Callable[Fixtures, Coroutine[Any, Any, None]]) -> Callable[Fixtures, None]:
    """Runs a test in a loop of its own; one that stands still fails."""

    @functools.wraps(test)
    def run(*fixtures: Fixtures.args, **named: Fixtures.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*fixtures, **named), 120))

    return run
