"""An agent's chat beside its side requests: extraction twice at once and a title after each reply, over HTTP."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.api.test_live import Live, assistant, serving, user
from tests.support import tiny_models

SYSTEM = {"role": "system", "content": "You help with a small garden and answer briefly. " * 10}
NUM_TURNS = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serving(tiny_models.write("lfm2", tmp_path_factory.mktemp("side") / "tiny"), slots=2) as live:
        yield live


async def ask(client: openai.AsyncOpenAI, messages: list[Any], session_id: str | None = None) -> Any:
    """A short answer, in a session as the chat's turns are, or without one as the side requests are."""
    body: dict[str, Any] = {"ignore_eos": True}
    if session_id is not None:
        body |= {"session_id": session_id, "cache_prompt": True}
    return await client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=6, temperature=0, extra_body=body
    )


def side_requests(history: list[Any]) -> list[list[Any]]:
    """Two extractions over the newest exchange, each with instructions of its own, and a title."""
    talk = "\n".join(str(message["content"]) for message in history[-3:])
    return [
        [{"role": "system", "content": "List facts worth remembering. " * 12}, user(talk)],
        [{"role": "system", "content": "Name skills that were used here. " * 12}, user(talk)],
        [user(f"A title of at most five words for: {talk}")],
    ]


def clocked(history: list[Any], turn: int, text: str) -> list[Any]:
    """The prompt of a turn: the clock stands before the newest message, and is no part of the history."""
    return [*history, user(f"It is 9:{10 + turn}."), user(text)]


def test_side_requests_cost_the_chat_none_of_its_state(server: Live) -> None:
    """Each turn reuses all that two prompts share, though others ran in between: up to where the clock stood."""

    async def chat() -> tuple[list[int], list[Any]]:
        cached: list[int] = []
        history: list[Any] = [SYSTEM]
        async with openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="agent", max_retries=0) as client:
            for turn in range(NUM_TURNS):
                text = f"Question {turn}: what grows here?"
                answer = await ask(client, clocked(history, turn, text), session_id="chat")
                cached.append(answer.usage.prompt_tokens_details.cached_tokens)
                history += [user(text), assistant(answer.choices[0].message.content)]
                await asyncio.gather(*(ask(client, prompt) for prompt in side_requests(history)))
        return cached, history

    cached, history = asyncio.run(chat())
    # Asked last: a prompt that ends there would leave a restore point of its own.
    shared = [server.ask(*history[: 2 * turn - 1]).usage.prompt_tokens for turn in range(1, NUM_TURNS)]
    assert all(found > known - 16 for found, known in zip(cached[1:], shared, strict=True)), (cached, shared)
    assert shared[-1] > shared[0] > 60
