"""Planning is shared out by size and client, bounded, and ends when its client has left."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.prompt import tokenize as pieces_module
from models.prompt.tokenize import Abandoned, encode, stop_if_abandoned
from server.api import planning as planning_module
from server.api import wire as body_module
from server.api.errors import ApiError, Code
from server.api.planning import SIZES, FairPlaces, Planning
from server.api.wire import check_amount, check_messages
from tests.server.api.test_live import WAIT_SECONDS, Live, raw_post, serving, user
from tests.server.api.test_live import until as until_so
from tests.support import tiny_models

SHORT, LONG = 1000, 5 << 20


class Work:
    """Work that lasts until it is let go."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()
        self.was_abandoned = False

    def __call__(self) -> str:
        """Waits as the renderer works: part by part."""
        self.has_begun.set()
        while not self.may_end.wait(0.001):
            try:
                stop_if_abandoned()
            except Abandoned:
                self.was_abandoned = True
                raise
        return "done"


def on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Runs a test on an event loop of its own."""

    def run() -> None:
        asyncio.run(test())

    return run


async def until(is_so: Callable[[], bool]) -> None:
    """Returns once something is so; a test that waits for good is a failure."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not is_so():  # noqa: ASYNC110  what is asked happens on other threads
            await asyncio.sleep(0.001)


@on_a_loop
async def test_a_short_body_waits_for_no_long_one() -> None:
    planning, long = Planning(), [Work() for _ in range(20)]
    running = [asyncio.create_task(planning.run("one", LONG, work)) for work in long]
    await until(long[0].has_begun.is_set)
    assert await planning.run("one", SHORT, lambda: "planned") == "planned"
    assert sum(work.has_begun.is_set() for work in long) == SIZES[-1].num_threads
    for work in long:
        work.may_end.set()
    assert await asyncio.gather(*running) == ["done"] * 20


@on_a_loop
async def test_clients_take_turns() -> None:
    planning, first, order = Planning(), Work(), list[str]()
    running = [asyncio.create_task(planning.run("many", LONG, first))]
    await until(first.has_begun.is_set)

    def noted(client: str) -> str:
        order.append(client)
        return client

    for client in ("many", "many", "many", "one"):
        running.append(asyncio.create_task(planning.run(client, LONG, partial(noted, client))))
        await asyncio.sleep(0)
    first.may_end.set()
    await asyncio.gather(*running)
    assert order == ["many", "one", "many", "many"]


@on_a_loop
async def test_what_waits_is_bounded() -> None:
    planning, first = Planning(max_waiting_bytes=LONG), Work()
    running = [asyncio.create_task(planning.run("a", LONG, work)) for work in (first, lambda: "done")]
    await until(first.has_begun.is_set)
    with pytest.raises(ApiError) as refused:
        await planning.run("b", LONG, lambda: "done")
    assert refused.value.code is Code.QUEUE_FULL
    assert "Retry-After" in refused.value.headers
    first.may_end.set()
    assert await asyncio.gather(*running) == ["done", "done"]
    assert await planning.run("b", LONG, lambda: "done") == "done"


@on_a_loop
async def test_the_work_of_a_client_that_left_ends_and_gives_its_place_back() -> None:
    planning, work = Planning(), Work()
    running = asyncio.create_task(planning.run("a", LONG, work))
    await until(work.has_begun.is_set)
    running.cancel()
    assert await planning.run("b", LONG, lambda: "next") == "next"
    assert work.was_abandoned


@on_a_loop
async def test_a_client_that_leaves_the_queue_costs_no_place() -> None:
    planning, work = Planning(), Work()
    running = asyncio.create_task(planning.run("a", LONG, work))
    await until(work.has_begun.is_set)
    waiting = [asyncio.create_task(planning.run("b", LONG, lambda: "never")) for _ in range(2)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    work.may_end.set()
    assert await running == "done"
    assert await planning.run("c", LONG, lambda: "next") == "next"
    assert planning._waiting_bytes == 0


@on_a_loop
async def test_failed_work_gives_its_place_back() -> None:
    def fail() -> None:
        raise ValueError("no")

    planning = Planning()
    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            await planning.run("a", LONG, fail)


@on_a_loop
async def test_a_place_freed_while_the_next_client_leaves_is_not_lost() -> None:
    for is_freed_first in (False, True):
        await _leave_as_a_place_is_freed(is_freed_first)


async def _leave_as_a_place_is_freed(is_freed_first: bool) -> None:
    places = FairPlaces(1)
    await places.take("first")
    leaving, staying = (asyncio.create_task(places.take(name)) for name in ("leaving", "staying"))
    await asyncio.sleep(0)
    # Cancelled, a task runs once more before it is out of the queue.
    for act in (places.release, leaving.cancel) if is_freed_first else (leaving.cancel, places.release):
        act()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await asyncio.wait_for(staying, WAIT_SECONDS)
    places.release()
    assert not places.locked()
    await places.take("last")
    assert places.locked()


# ------------------------------------------------------------------------------------------- one word of megabytes

WORD = "z" * 4_000_000
ORDINARY: dict[str, Any] = {"content": "some words and\nmore " * 6000, "unknown": "x" * (1 << 20)}
"""A text of many parts, in a body as long as one with the word."""
LONG_WORDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [user(WORD)]}),
    ("/v1/completions", {"prompt": WORD}),
    ("/v1/embeddings", {"input": WORD}),
    ("/tokenize", {"content": WORD}),
    ("/tokenize", {"content": WORD, "parse_special": False}),
]
WAYS = ["chat", "completion", "embedding", "tokens", "plain tokens"]


class HeldWord:
    """Stands before the tokenizer: holds the calls that get a part of the long word, and counts them."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.may_go = threading.Event()

    def __call__(self, backend: Any, text: str, **options: bool) -> Any:
        """Passes the text on."""
        if "zzz" in text:
            self.lengths.append(len(text))
            assert self.may_go.wait(WAIT_SECONDS)
        return encode(backend, text, **options)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serving(tiny_models.write("llama", tmp_path_factory.mktemp("planning") / "tiny")) as server:
        yield server


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldWord:
    word = HeldWord()
    monkeypatch.setattr(pieces_module, "encode", word)
    return word


@pytest.mark.parametrize(("path", "fields"), LONG_WORDS, ids=WAYS)
def test_a_long_word_whose_client_has_left_holds_up_nobody(
    live: Live, held: HeldWord, path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_left, call = list[threading.Event](), planning_module._call

    def noted(event: threading.Event, work: Callable[[], Any]) -> Any:
        has_left.append(event)
        return call(event, work)

    monkeypatch.setattr(planning_module, "_call", noted)
    connection = raw_post(live.address, path, fields)
    until_so(lambda: bool(held.lengths))
    assert live.post("/tokenize", content="a small one").status_code == 200
    connection.close()
    until_so(has_left[0].is_set)
    held.may_go.set()
    assert len(live.post("/tokenize", **ORDINARY).json()["tokens"]) > 6000
    assert len(held.lengths) == 1 and held.lengths[0] < 40_000, "the call that ran was short, and the last"


@pytest.mark.parametrize(("path", "fields"), LONG_WORDS[:3], ids=WAYS[:3])
def test_a_long_word_that_the_context_cannot_hold_is_refused_early(
    live: Live, held: HeldWord, path: str, fields: dict[str, Any]
) -> None:
    held.may_go.set()
    refused = live.post(path, **fields)
    assert refused.status_code == 400 and "tokens or more" in refused.json()["error"]["message"]
    assert sum(held.lengths) < 100_000


def refusal(check: Callable[[], None]) -> ApiError | None:
    """Returns what a check raises."""
    try:
        check()
    except ApiError as error:
        return error
    return None


def count(value: Any) -> tuple[int, int]:
    """Returns the texts and containers of a JSON value, and its commas, by walking through it."""
    if isinstance(value, str):
        return 1, 0
    if not isinstance(value, dict | list):
        return 0, 0
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    counts = [count(entry) for entry in inner]
    return 1 + sum(texts for texts, _ in counts), max(0, len(value) - 1) + sum(commas for _, commas in counts)


JSON = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(st.sampled_from('ab"\\{[,é\n'), max_size=6)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.sampled_from('a"\\,'), max_size=3), inner),
    max_leaves=20,
)


@settings(max_examples=60)
@given(JSON, st.integers(1, 9), st.booleans())
def test_a_body_is_counted_as_it_will_be_parsed(value: Any, block: int, ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_module, "_BLOCK_BYTES", block)
        assert body_module._amounts(raw) == count(value)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"messages": [' + b'{"role": "user"},' * 80_000 + b"{}]}",
        b'{"prompt": [' + b"1," * 2_000_001 + b"1]}",
        b"[" * 300_000,
    ],
)
def test_more_than_may_be_parsed_is_refused(raw: bytes) -> None:
    refused = refusal(lambda: check_amount(raw))
    assert refused is not None
    assert refused.code is Code.INVALID_VALUE


def test_text_is_no_structure() -> None:
    check_amount(json.dumps({"prompt": '{["\\",' * 1_000_000}).encode())


@pytest.mark.parametrize(
    "message",
    [{"role": "user", "content": "x"}, {"content": [{}, {}]}, {"content": [{}], "tool_calls": [{}]}, 7],
)
def test_a_conversation_of_too_many_messages_is_refused_with_the_limit(message: Any) -> None:
    entries = body_module._num_entries(message)
    check_messages({"messages": [message] * (body_module.MAX_MESSAGES // entries)})
    refused = refusal(lambda: check_messages({"messages": [message] * (body_module.MAX_MESSAGES // entries + 1)}))
    assert refused is not None
    assert (refused.code, refused.param) == (Code.INVALID_VALUE, "messages")
    assert str(body_module.MAX_MESSAGES) in refused.message


def test_messages_of_another_type_are_left_to_their_own_check() -> None:
    for messages in (None, "x", {"a": 1}):
        check_messages({"messages": messages})
