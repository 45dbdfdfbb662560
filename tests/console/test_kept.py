"""No word of a chat is lost: reload, crash, a server that is killed, no network, two tabs, another chat, no room left."""

import contextlib
import json
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Error, Page, Route, expect

from server.api.connections import Limits
from server.app.config import ServerConfig
from tests.console.test_console import problems_of
from tests.support.apps import create_app
from tests.support.browser import BROWSER
from tests.support.fake_engine import FakeEngine, Script, fake_model
from tests.support.live_server import running
from tests.support.server_process import Process
from tests.support.tiny_models import write

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium was found; CHROMIUM may name one")

WORDS = tuple(f"word{number} " for number in range(60))
WHOLE = "".join(WORDS).strip()
KEPT = re.compile(r"#/chat/[0-9a-f-]{36}$")


@pytest.fixture
def engine() -> FakeEngine:
    """Says ten words of an answer, and the others once `max_texts` is None."""
    return FakeEngine(Script(WORDS), max_texts=10)


@pytest.fixture
def address(engine: FakeEngine) -> Iterator[str]:
    with running(create_app(engine, fake_model(context_tokens=4000), ServerConfig())) as base:
        yield base
        engine.max_texts = None


@pytest.fixture
def page(address: str, context: BrowserContext) -> Page:
    return opened(context, f"{address}/#/chat/new")


def opened(context: BrowserContext, address: str, script: str = "") -> Page:
    page = context.new_page()
    page.add_init_script(script)
    page.goto(address)
    expect(field_of(page)).to_be_focused()
    return page


def field_of(page: Page) -> Any:
    return page.get_by_label("Message", exact=True)


def ask(page: Page, text: str) -> None:
    field_of(page).fill(text)
    field_of(page).press("Enter")


def answer_of(page: Page) -> Any:
    return page.locator(".message.assistant .text").last


def wait_for_words(page: Page, word: str = "word5 ") -> None:
    expect(answer_of(page)).to_contain_text(word)


def is_whole(page: Page) -> None:
    """Asserts that the last answer has ended, with each of its words once."""
    expect(page.locator("[aria-busy=true]")).to_have_count(0)
    expect(answer_of(page)).to_have_text(WHOLE)


RECORDS = """(wanted) => new Promise((done) => {
    const asked = indexedDB.open("mlx-serve", 1);
    asked.onsuccess = () => {
        const all = asked.result.transaction("conversations").objectStore("conversations").getAll();
        all.onsuccess = () => { asked.result.close(); done((%s)(all.result, wanted)); };
    };
})"""
"""What a function says of the conversations and drafts that the browser has kept."""
NODES = "all.flatMap((one) => Object.values(one.nodes ?? {}))"
IS_TAKEN = (
    f"(all) => ((open) => open.length && open.every((node) => node.run.id))({NODES}.filter((node) => node.run))"
)
HAVE_ENDED = f"(all, count) => ((said) => said.length === count && !said.some((node) => node.run))({NODES})"
IS_DRAFT = "(all, text) => all.some((one) => one.text === text)"


def wait_until_true(page: Page, question: str, wanted: Any = None) -> None:
    """Waits until an asynchronous function says yes: `wait_for_function` takes its promise for a yes."""
    look = f"([seen, wanted]) => {{ ({question})(wanted).then((yes) => (seen.yes ||= yes)); return seen.yes; }}"
    page.wait_for_function(look, arg=[page.evaluate_handle("() => ({})"), wanted])


def wait_until_kept(page: Page, condition: str, wanted: Any = None) -> None:
    """Waits for what the browser writes, which nothing on the page shows."""
    wait_until_true(page, RECORDS % condition, wanted)


def begin(page: Page, text: str = "A question") -> None:
    """Asks, and waits for words of the answer: a page that is gone from now on does not ask again."""
    ask(page, text)
    wait_for_words(page)
    wait_until_kept(page, IS_TAKEN)


def end(engine: FakeEngine, page: Page) -> None:
    """Has all answers end, and asserts that the page has the last one whole."""
    engine.max_texts = None
    is_whole(page)


def test_a_reload_in_the_middle_of_a_first_answer(page: Page, engine: FakeEngine) -> None:
    begin(page, "My first question")
    expect(page).to_have_url(KEPT)
    page.reload()
    expect(page.locator(".message.user")).to_contain_text("My first question")
    wait_for_words(page, "word0 word1")
    end(engine, page)
    expect(page.locator(".chats li")).to_have_count(1)
    page.reload()
    is_whole(page)
    assert len(engine.requests) == 1 and not engine.cancelled


def test_a_reload_at_once_asks_the_question_that_was_not_taken(page: Page, engine: FakeEngine) -> None:
    on_its_way: list[Route] = []
    page.route("**/v1/responses", lambda route: route.continue_() if on_its_way else on_its_way.append(route))
    with page.expect_request("**/v1/responses"):
        ask(page, "A question")
    expect(page).to_have_url(KEPT)
    assert len(on_its_way) == 1 and not engine.requests
    page.reload()
    end(engine, page)
    expect(page.locator(".message")).to_have_count(2)
    assert len(engine.requests) == 1


def test_a_tab_that_crashes(page: Page, context: BrowserContext, address: str, engine: FakeEngine) -> None:
    begin(page)
    field_of(page).press_sequentially("half a thou")
    wait_until_kept(page, IS_DRAFT, "half a thou")
    with contextlib.suppress(Error):
        page.goto("chrome://crash")
    other = context.new_page()
    other.goto(f"{address}/health")
    wait_until_true(other, "async () => (await navigator.locks.query()).held.length === 0")  # the tab is gone
    other.goto(f"{address}/#/chat")
    expect(field_of(other)).to_have_value("half a thou")
    end(engine, other)
    assert len(engine.requests) == 1 and not engine.cancelled


def test_a_closed_tab_leaves_its_answer_to_another(page: Page, context: BrowserContext, engine: FakeEngine) -> None:
    begin(page)
    other = opened(context, page.url)
    wait_for_words(other)
    page.close()
    end(engine, other)
    assert len(engine.requests) == 1


def test_two_tabs_on_one_chat(page: Page, context: BrowserContext, engine: FakeEngine) -> None:
    engine.max_texts = None
    ask(page, "Of the first tab")
    is_whole(page)
    other = opened(context, page.url)
    for one, text in ((page, "draft of the first"), (other, "draft of the second")):
        field_of(one).fill(text)
        wait_until_kept(one, IS_DRAFT, text)
    for one, text in ((page, "draft of the first"), (other, "draft of the second")):
        one.reload()
        expect(field_of(one)).to_have_value(text)
    field_of(page).press("Enter")
    field_of(other).press("Enter")
    wait_until_kept(page, HAVE_ENDED, 6)
    for one in (page, other):
        # The second one is another way from the same place, or waited for the end of the first.
        expect(one.locator(".message.waits")).to_have_count(0)
        is_whole(one)
        expect(one.locator(".chats li")).to_have_count(1)
    kept = page.evaluate(RECORDS % f"(all) => {NODES}")
    said = sorted(node["content"] for node in kept if node["role"] == "user")
    assert said == ["Of the first tab", "draft of the first", "draft of the second"]
    answers = [node for node in kept if node["role"] == "assistant"]
    assert [node["content"].strip() for node in answers] == [WHOLE] * 3 and len(engine.requests) == 3


OPENED_WHILE_READ = """
const get = IDBObjectStore.prototype.get;
let isFirst = true;
IDBObjectStore.prototype.get = function (id) {
  const asked = get.call(this, id);
  if (isFirst) {
    document.querySelector(".chats a").click();
    // What was read is not there before the page reads it once more.
    const wait = () => { if (IDBObjectStore.prototype.get !== get) get.call(this, id).onsuccess = wait; };
    wait();
  } else IDBObjectStore.prototype.get = get;
  isFirst = false;
  return asked;
};"""


def test_a_chat_that_is_opened_while_another_tab_goes_on_with_it(
    address: str, page: Page, context: BrowserContext, engine: FakeEngine
) -> None:
    engine.max_texts = None
    ask(page, "A question")
    wait_until_kept(page, HAVE_ENDED, 2)
    other = opened(context, f"{address}/#/chat/new", OPENED_WHILE_READ)
    engine.max_texts = 10
    ask(page, "And then?")
    wait_for_words(other)
    end(engine, page)
    is_whole(other)
    ask(page, "At last?")
    expect(page.locator(".message")).to_have_count(6)
    is_whole(page)
    expect(other.locator(".message")).to_have_count(6)
    is_whole(other)


def test_two_tabs_that_hear_nothing_of_each_other(address: str, context: BrowserContext, engine: FakeEngine) -> None:
    engine.script = Script()
    alone = "delete window.BroadcastChannel"
    page = opened(context, f"{address}/#/chat/new", alone)
    ask(page, "Of both")
    expect(answer_of(page)).to_have_text("Hello there.")
    other = opened(context, page.url, alone)
    expect(answer_of(other)).to_have_text("Hello there.")
    for tab, text in ((page, "Of the first"), (other, "Of the second")):
        ask(tab, text)
        expect(tab.locator(".message.user").last).to_contain_text(text)
        expect(answer_of(tab)).to_have_text("Hello there.")
        expect(tab.locator("[aria-busy=true]")).to_have_count(0)
    wait_until_kept(page, HAVE_ENDED, 6)
    kept = page.evaluate(RECORDS % f"(all) => {NODES}")
    said = sorted(node["content"] for node in kept if node["role"] == "user")
    assert said == ["Of both", "Of the first", "Of the second"]


SENT_AT_ONCE = """() => {
  [...document.querySelectorAll("button")].find((one) => one.textContent === "New chat").click();
  const input = document.querySelector("textarea[aria-label=Message]");
  input.value = "The second chat";
  input.form.requestSubmit();
}"""


def test_a_message_that_is_sent_before_a_new_chat_has_its_address(page: Page) -> None:
    ask(page, "The first chat")
    wait_for_words(page)
    page.evaluate(SENT_AT_ONCE)
    expect(page.locator(".message.user")).to_contain_text("The second chat")
    wait_for_words(page)
    expect(page.locator(".message.user")).to_have_count(1)


def test_answers_of_two_chats_at_once(page: Page, engine: FakeEngine) -> None:
    ask(page, "The first chat")
    wait_for_words(page)
    first = page.url
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator(".chats").get_by_label("is being answered")).to_have_count(1)
    ask(page, "The second chat")
    wait_for_words(page)
    page.get_by_role("link", name="The first chat").click()
    expect(page).to_have_url(first)
    expect(page.locator(".message.user")).to_contain_text("The first chat")
    end(engine, page)
    page.get_by_role("link", name="The second chat").click()
    expect(page.locator(".message.user")).to_contain_text("The second chat")
    is_whole(page)
    expect(page.locator(".chats").get_by_label("is being answered")).to_have_count(0)
    assert len(engine.requests) == 2 and not engine.cancelled


def test_what_is_sent_while_an_answer_runs_waits(page: Page, engine: FakeEngine) -> None:
    begin(page)
    ask(page, "And then?")
    waits = page.locator(".message.waits")
    expect(waits).to_contain_text("And then?")
    expect(waits).to_contain_text("Waits for the end of this answer")
    expect(page.locator(".talk > [role=status]")).to_have_text("Your message waits for the end of this answer.")
    ask(page, "Never mind")
    expect(waits).to_have_count(2)
    waits.last.get_by_role("button", name="Take back").click()
    expect(field_of(page)).to_have_value("Never mind")
    expect(waits).to_have_count(1)
    wait_until_kept(page, IS_DRAFT, "Never mind")
    wait_until_kept(page, "(all) => all.some((one) => Object.values(one.queued ?? {}).some((other) => other.gone))")
    page.reload()
    expect(waits).to_have_count(1)
    engine.max_texts = None
    expect(page.locator(".message.user")).to_have_count(2)
    expect(page.locator(".message.assistant")).to_have_count(2)
    is_whole(page)
    expect(waits).to_have_count(0)
    expect(field_of(page)).to_have_value("Never mind")
    assert len(engine.requests) == 2


@pytest.mark.usual
def test_what_waits_for_a_stopped_answer_is_sent_when_it_is_asked_for(page: Page, engine: FakeEngine) -> None:
    ask(page, "A question")
    wait_for_words(page)
    ask(page, "And then?")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".message.assistant footer")).to_contain_text("stopped")
    assert engine.cancelled
    expect(page.locator(".message.waits")).to_contain_text("Not sent")
    assert problems_of(page) == ""
    text = answer_of(page).inner_text()
    wait_until_kept(page, HAVE_ENDED, 2)
    page.reload()
    expect(answer_of(page)).to_have_text(text)
    engine.max_texts = None
    page.get_by_role("button", name="Send now").click()
    expect(page.locator(".message.assistant")).to_have_count(2)
    is_whole(page)


def test_escape_in_the_editor_does_not_stop_an_answer(page: Page, engine: FakeEngine) -> None:
    begin(page)
    page.locator(".message.user").get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").press("Escape")
    expect(field_of(page)).to_be_focused()
    end(engine, page)


def test_an_answer_that_was_stopped_is_gone_on_with(page: Page, engine: FakeEngine) -> None:
    ask(page, "A question")
    wait_for_words(page)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".message.assistant footer")).to_contain_text("stopped")
    begun = answer_of(page).inner_text()
    engine.script = Script(("and the rest.",))
    page.get_by_role("button", name="Go on").click()
    expect(answer_of(page)).to_contain_text("and the rest.")
    assert answer_of(page).inner_text().startswith(begun)
    assert "".join(map(chr, engine.requests[-1].tokens)).rstrip().endswith(f"<assistant>{begun}")


def test_drafts_are_kept_while_they_are_typed(page: Page, context: BrowserContext, engine: FakeEngine) -> None:
    engine.script = Script()
    page.get_by_text("System message and settings").click()
    page.get_by_label("System message", exact=True).fill("Be terse.")
    field_of(page).press_sequentially("A first thou")
    wait_until_kept(
        page, '(all) => all.some((one) => one.text === "A first thou" && one.conversation.system === "Be terse.")'
    )
    page.reload()
    expect(field_of(page)).to_have_value("A first thou")
    field_of(page).press("Enter")
    expect(answer_of(page)).to_have_text("Hello there.")
    assert "".join(map(chr, engine.requests[0].tokens)).startswith("<system>Be terse.")
    wait_until_kept(page, "(all) => all.every((one) => one.nodes)")
    page.reload()
    expect(field_of(page)).to_have_value("")
    page.locator(".message.user").get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("A better thought")
    wait_until_kept(page, IS_DRAFT, "A better thought")
    page.reload()
    page.locator(".message.user").get_by_role("button", name="Edit").click()
    expect(page.get_by_label("Edit the message")).to_have_value("A better thought")
    field_of(page).fill("of the first chat")
    page.get_by_role("button", name="New chat").click()
    expect(field_of(page)).to_have_value("")
    field_of(page).fill("of the new chat")
    page.locator(".chats a").click()
    expect(field_of(page)).to_have_value("of the first chat")
    page.get_by_role("button", name="New chat").click()
    expect(field_of(page)).to_have_value("of the new chat")


class Wire:
    """A way to a server that can be cut, and mended."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._open: list[socket.socket] = []
        self._stalled: list[socket.socket] = []
        self._is_cut = False
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        with self._lock:
            self._is_cut = True
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._is_cut = False

    def stall(self) -> None:
        """Has all that is open carry nothing any more, and stay open."""
        with self._lock:
            self._open, self._stalled = [], self._open

    def close(self) -> None:
        self._open += self._stalled
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                with self._lock:
                    if self._is_cut:
                        near.close()
                        continue
                    far = socket.create_connection(("127.0.0.1", self._to))
                    self._open += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                if one in self._open:
                    other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def wire_to(address: str) -> Iterator[Wire]:
    wire = Wire(int(address.rpartition(":")[2]))
    try:
        yield wire
    finally:
        wire.close()


@pytest.fixture
def wire(address: str) -> Iterator[Wire]:
    with wire_to(address) as wire:
        yield wire


@pytest.mark.usual
def test_a_network_that_goes_and_comes(wire: Wire, context: BrowserContext, engine: FakeEngine) -> None:
    page = opened(context, f"http://127.0.0.1:{wire.port}/#/chat/new")
    ask(page, "A question")
    wait_for_words(page)
    wire.cut()
    expect(page.locator(".thread")).to_contain_text("The server does not answer. What has been said is kept")
    assert problems_of(page) == ""
    ask(page, "One more")
    wire.mend()
    engine.max_texts = None
    expect(page.locator(".message.assistant")).to_have_count(2)
    is_whole(page)
    expect(page.locator(".message.assistant .text").first).to_have_text(WHOLE)
    wire.cut()
    ask(page, "Without a network")
    expect(page.locator(".thread")).to_contain_text("The server does not answer. What has been said is kept")
    wire.mend()
    is_whole(page)
    expect(page.locator(".message.assistant")).to_have_count(3)
    assert len(engine.requests) == 3 and not engine.cancelled


@pytest.mark.usual
def test_a_connection_of_which_nothing_is_heard_any_more(context: BrowserContext, engine: FakeEngine) -> None:
    # The browser may ask by another connection that nothing is heard of, until the server closes idle ones.
    app = create_app(engine, fake_model(context_tokens=4000), ServerConfig())
    with running(app, Limits(client_seconds=3.0)) as address, wire_to(address) as wire:
        page = opened(context, f"http://127.0.0.1:{wire.port}/#/chat/new")
        ask(page, "A question")
        wait_for_words(page)
        wire.stall()
        engine.max_texts = None
        page.evaluate("() => void dispatchEvent(new Event('online'))")
        is_whole(page)
        page.close()
    assert len(engine.requests) == 1


@pytest.mark.usual
def test_a_server_that_is_killed(context: BrowserContext, tmp_path: Path) -> None:
    folder = write("qwen3", tmp_path / "tiny")
    server = Process(str(folder), "--port", "0")
    try:
        port = server.port
        page = opened(context, f"http://127.0.0.1:{port}/#/chat/new")
        # Without chance, what this model says to it does not end by itself.
        page.get_by_text("System message and settings").click()
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Temperature").press("Tab")
        ask(page, "one two")
        expect(page.locator(".message.assistant .text")).not_to_be_empty()
        server.signal(signal.SIGKILL)
        server.wait()
        expect(page.locator(".thread")).to_contain_text("The server does not answer")
        text = answer_of(page).text_content()
        server = Process(str(folder), "--port", str(port))
        assert server.port == port
        expect(page.locator(".message.assistant .bad")).to_contain_text("has been started anew")
        assert text and (answer_of(page).text_content() or "").startswith(text)
        wait_until_kept(page, HAVE_ENDED, 2)
        page.reload()
        expect(page.locator(".message.user")).to_contain_text("one two")
        assert (answer_of(page).text_content() or "").startswith(text)
        expect(page.get_by_role("button", name="Try again")).to_be_visible()
    finally:
        server.close()


def test_a_browser_without_room_says_so_and_loses_nothing_of_what_it_shows(page: Page, engine: FakeEngine) -> None:
    engine.max_texts = None
    page.evaluate("""() => {
        window.put = IDBObjectStore.prototype.put;
        IDBObjectStore.prototype.put = () => { throw new DOMException("full", "QuotaExceededError"); };
    }""")
    ask(page, "A question")
    expect(page.get_by_role("alert")).to_contain_text("The browser has no room left")
    is_whole(page)
    page.evaluate("() => { IDBObjectStore.prototype.put = window.put; }")
    ask(page, "And then?")
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.locator(".message.assistant")).to_have_count(2)
    is_whole(page)
    wait_until_kept(page, HAVE_ENDED, 4)
    page.reload()
    expect(page.locator(".message")).to_have_count(4)


def test_a_browser_that_keeps_nothing_says_so_and_answers(
    address: str, context: BrowserContext, engine: FakeEngine
) -> None:
    script = "indexedDB.open = () => { throw new DOMException('private', 'InvalidStateError'); }"
    page = opened(context, f"{address}/#/chat/new", script)
    expect(page.locator(".chats")).to_contain_text("This browser keeps nothing")
    ask(page, "A question")
    wait_for_words(page)
    ask(page, "And then?")
    engine.max_texts = None
    expect(page.locator(".message.assistant")).to_have_count(2)
    is_whole(page)


WITHOUT_LOCKS = "Object.defineProperty(navigator, 'locks', { value: undefined })"


@pytest.mark.usual
def test_without_locks_two_tabs_follow_one_answer(address: str, context: BrowserContext, engine: FakeEngine) -> None:
    page = opened(context, f"{address}/#/chat/new", WITHOUT_LOCKS)
    begin(page)
    other = opened(context, page.url, WITHOUT_LOCKS)
    wait_for_words(other)
    end(engine, page)
    is_whole(other)
    other.reload()
    is_whole(other)
    expect(other.locator(".message .bad")).to_have_count(0)
    assert len(engine.requests) == 1


@pytest.mark.usual
def test_without_locks_a_question_is_left_for_a_while_to_the_page_that_sends_it(
    address: str, context: BrowserContext, engine: FakeEngine
) -> None:
    engine.max_texts = None
    on_their_way: list[Route] = []
    page = opened(context, f"{address}/#/chat/new", WITHOUT_LOCKS)
    page.route("**/v1/responses", lambda route: on_their_way.append(route))
    with page.expect_request("**/v1/responses"):
        ask(page, "A question")
    other = context.new_page()
    other.add_init_script(WITHOUT_LOCKS)
    other.add_init_script("window.time = Date.now(); Date.now = () => window.time")
    other.goto(page.url)
    expect(other.locator(".message.assistant")).to_have_count(1)
    assert not engine.requests
    on_their_way.pop().continue_()
    is_whole(page)
    is_whole(other)
    assert len(engine.requests) == 1
    with page.expect_request("**/v1/responses"):
        ask(page, "Another question")
    expect(other.locator(".message.assistant")).to_have_count(2)
    page.goto(f"{address}/health")
    other.evaluate("() => void setInterval(() => { window.time += 10000; }, 10)")
    is_whole(other)
    assert len(engine.requests) == 2


def test_on_a_phone_enter_breaks_the_line(chromium: Browser, address: str, engine: FakeEngine) -> None:
    context = chromium.new_context(viewport={"width": 400, "height": 800}, has_touch=True, is_mobile=True)
    page = opened(context, f"{address}/#/chat/new")
    field = field_of(page)
    field.fill("one")
    field.press("Enter")
    field.press_sequentially("two")
    expect(field).to_have_value("one\ntwo")
    page.get_by_role("button", name="Send", exact=True).click()
    end(engine, page)
    context.close()


def test_a_question_that_is_refused_stays_and_can_be_asked_again(page: Page, engine: FakeEngine) -> None:
    engine.max_waiting = 0
    ask(page, "A question")
    expect(page.locator(".message .bad")).to_be_visible()
    wait_until_kept(page, HAVE_ENDED, 2)
    page.reload()
    engine.max_waiting = None
    page.get_by_role("button", name="Try again").click()
    end(engine, page)


def test_a_tool_is_called_and_answered_by_hand(page: Page, engine: FakeEngine) -> None:
    call = json.dumps({"name": "get_weather", "arguments": {"city": "Bern"}})
    engine.script = Script(("Let me look.<tool_call>", call[:20], call[20:], "</tool_call>"))
    page.get_by_text("System message and settings").click()
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    page.get_by_label("Tools, as JSON").fill(json.dumps([tool]))
    page.get_by_label("Tools, as JSON").press("Tab")
    ask(page, "The weather?")
    expect(page.locator(".call")).to_contain_text('{"city": "Bern"}')
    expect(answer_of(page)).to_have_text("Let me look.")
    wait_until_kept(page, HAVE_ENDED, 2)
    page.reload()
    engine.script = Script()
    page.get_by_label("What get_weather answers").fill("Sunny")
    page.get_by_role("button", name="Answer", exact=True).click()
    expect(answer_of(page)).to_have_text("Hello there.")
    assert "".join(map(chr, engine.requests[1].tokens)).endswith("<assistant>Let me look.<tool>Sunny")
