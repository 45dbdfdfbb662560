"""What is slow, or comes in another order than it was asked for, is shown as it was asked for."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import BrowserContext, Page, Route, expect

from server.app.config import ServerConfig
from tests.console.test_chat import PNG, give, seeing
from tests.console.test_console import open_chat, say
from tests.console.test_kept import wait_until_kept
from tests.support.apps import create_app
from tests.support.browser import BROWSER, expect_toast
from tests.support.fake_engine import FakeEngine, Script, fake_model
from tests.support.live_server import running

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium was found; CHROMIUM may name one")


@pytest.fixture
def address() -> Iterator[str]:
    with running(create_app(FakeEngine(Script(("Well.",))), fake_model(context_tokens=4000), ServerConfig())) as base:
        yield base


HOLDING = """
const ask = window.fetch;
window.__waiting = [];
window.__asked = [];
window.fetch = async (...given) => {
    const question = `${given[1].method} ${given[0]}`, isHeld = window.__held && question.includes(window.__held);
    window.__asked.push(question);
    const answer = await ask(...given);
    if (!isHeld) return answer;
    const body = await answer.json();
    await new Promise((go) => window.__waiting.push(go));
    return Object.assign(answer, { json: async () => body });
};"""
"""Holds answers to questions, as "GET http://…", that have `__held` in them."""


@pytest.fixture
def page(context: BrowserContext) -> Page:
    page = context.new_page()
    page.add_init_script(HOLDING)
    return page


def hold(page: Page, part: str) -> None:
    page.evaluate("(part) => void (window.__held = part)", part)


def wait_until_held(page: Page) -> None:
    """Waits until an answer has come, and holds none to later questions."""
    page.wait_for_function("() => window.__waiting.length > 0")
    page.evaluate("() => void (window.__held = null)")


def let_go(page: Page) -> Any:
    """Has the page take what was held; returns all questions that it had asked when it had taken that."""
    page_takes = "__waiting.splice(0).forEach((go) => go())"
    return page.evaluate(f"() => {{ {page_takes}; return new Promise((done) => setTimeout(() => done(__asked))); }}")


def ask(address: str, session_id: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "session_id": session_id}
    httpx.post(f"{address}/v1/chat/completions", json=body, timeout=120).raise_for_status()


# ------------------------------------------------------------------------------------------------ other views


def test_a_request_of_before_the_page_heard_of_any_is_shown(page: Page, address: str) -> None:
    on_their_way: list[Route] = []
    page.route("**/v1/events", lambda route: on_their_way.append(route))
    with page.expect_request("**/v1/events"), page.expect_response("**/v1/requests") as listed:
        page.goto(f"{address}/#/requests")
    listed.value.finished()
    ask(address, "early")
    on_their_way.pop().continue_()
    expect(page.get_by_role("button", name="early")).to_be_visible()


def test_a_list_on_its_way_takes_nothing_back_that_an_event_has_told(page: Page, address: str) -> None:
    page.goto(address)
    phase = page.evaluate(
        """async () => {
            const { Live } = await import("/console/lib/live.js");
            const answers = [], live = new Live({ get: () => new Promise((done) => answers.push(done)) });
            const loaded = live.load();
            live.note({ type: "request.queued", id: "r", time: 1 });
            live.note({ type: "request.first_token", id: "r", time: 2, ms: 5 });
            answers[0]({ data: [{ id: "r", received: 1, phase: "prefill" }], levels: [] });
            await loaded;
            return live.requests.get("r").phase;
        }"""
    )
    assert phase == "decode"


def test_a_session_stays_when_the_answer_about_another_comes_late(page: Page, address: str) -> None:
    ask(address, "one")
    ask(address, "two")
    page.goto(f"{address}/#/sessions")
    hold(page, "v1/sessions/one")
    page.get_by_role("link", name="one").click()
    wait_until_held(page)
    page.goto(f"{address}/#/sessions/two")
    expect(page.locator(".turns li")).to_have_count(1)
    let_go(page)
    expect(page.get_by_role("heading", name="two")).to_be_visible()


def test_a_session_that_is_pinned_is_said_to_be_from_wherever_it_is_opened(page: Page, address: str) -> None:
    ask(address, "one")
    page.route("**/v1/cache?*", lambda route: route.fulfill(json={"pinned_sessions": ["one"]}))
    page.goto(f"{address}/#/sessions")
    page.get_by_role("link", name="one").click()
    expect(page.get_by_role("button", name="Unpin")).to_be_visible()


def test_who_has_left_a_session_is_not_brought_back_when_it_is_forgotten(page: Page, address: str) -> None:
    ask(address, "one")
    page.goto(f"{address}/#/sessions/one")
    expect(page.locator(".turns li")).to_have_count(1)
    hold(page, "DELETE")
    page.get_by_role("button", name="Forget").click()
    wait_until_held(page)
    page.goto(f"{address}/#/now")
    let_go(page)
    expect_toast(page, "Forgotten.")
    expect(page).to_have_url(f"{address}/#/now")


def test_models_are_shown_with_their_sizes_or_not_yet(page: Page, address: str) -> None:
    page.goto(address)
    hold(page, "api/tags")
    page.goto(f"{address}/#/models")
    page.wait_for_function("() => window.__waiting.length > 0")
    status = page.locator("#status")
    # What the page learns meanwhile has it draw all that is shown, and ask once more.
    expect(status).not_to_have_text(status.inner_text())
    expect(page.locator(".view.models")).to_have_text("Asking the server …")
    wait_until_held(page)
    let_go(page)
    expect(page.locator(".models li")).to_have_count(1)


def test_a_list_of_models_that_comes_late_takes_the_place_of_no_newer_one(page: Page, address: str) -> None:
    page.goto(f"{address}/#/models")
    expect(page.locator(".models li")).to_have_count(1)
    hold(page, "v1/models")
    page.goto(f"{address}/#/now")
    page.goto(f"{address}/#/models")
    wait_until_held(page)
    newer = [{"id": name, "object": "model", "loaded": False} for name in ("tiny", "another")]
    page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": newer}))
    page.goto(f"{address}/#/now")
    page.goto(f"{address}/#/models")
    expect(page.locator(".models li")).to_have_count(2)
    let_go(page)
    page.get_by_label("Search").fill("another")
    expect(page.locator(".models li")).to_have_count(1)


def tree(page: Page) -> None:
    """Has the page find an edge in each of two namespaces, and two earlier trees."""
    body: dict[str, Any] = {
        "nodes": [{"id": 1, "parent": None, "start": 0, "stop": 9, "tokens": 9, "bytes": 9, "tier": "memory", "uses": 1,
                   "disk_tokens": 0, "name": None, "preview": "x"}],
        "disk_nodes": [], "num_nodes": 1, "sessions": [], "model": "tiny", "truncated": False, "evictions": 0,
        "earlier": [1, 2], "time": 1, "namespaces": [{"namespace": name, "num_nodes": 1} for name in ("", "/b")],
    }  # fmt: skip
    page.route(
        "**/v1/cache?*",
        lambda route: route.fulfill(json={**body, "namespace": "/b" if "namespace=" in route.request.url else ""}),
    )


def test_another_namespace_is_asked_for_at_once_though_the_tree_is_being_read(page: Page, address: str) -> None:
    tree(page)
    page.goto(f"{address}/#/tree")
    expect(page.get_by_label("Namespace")).to_be_visible()
    hold(page, "v1/cache?")
    page.goto(f"{address}/#/now")
    page.goto(f"{address}/#/tree")
    wait_until_held(page)
    page.get_by_label("Namespace").select_option("/b")
    page.get_by_label("Width by").select_option("tokens")  # of a tree that is not there yet
    assert any("namespace=%2Fb" in one for one in let_go(page))
    expect(page.locator(".view.tree aside")).to_contain_text("Point at an edge")


def test_a_tree_of_before_that_comes_late_is_not_shown_any_more(page: Page, address: str) -> None:
    tree(page)
    page.goto(f"{address}/#/tree")
    slider = page.get_by_label("Time")
    slider.press("Home")
    expect(page.locator(".changes")).to_have_count(1)
    slider.press("End")
    expect(page.locator(".changes")).to_have_count(0)
    hold(page, "at=")
    slider.press("Home")
    wait_until_held(page)
    slider.press("End")
    let_go(page)
    expect(page.locator(".changes")).to_have_count(0)


# -------------------------------------------------------------------------------------------------- the chat

HELD_READ = """
window.__isHeld = true;
const get = IDBObjectStore.prototype.get;
IDBObjectStore.prototype.get = function (id) {
    IDBObjectStore.prototype.get = get;
    const asked = get.call(this, id);
    const wait = () => { if (window.__isHeld) get.call(this, id).onsuccess = wait; };
    wait();
    window.__isReading = true;
    return asked;
};"""
"""The first conversation that is read is there once `__isHeld` is false."""
HELD_WRITE = """() => {
    window.__isHeld = true;
    const put = IDBObjectStore.prototype.put;
    IDBObjectStore.prototype.put = function (record) {
        const asked = put.call(this, record);
        const wait = () => { if (window.__isHeld) this.get(0).onsuccess = wait; };
        if (record.nodes) wait();
        window.__isWriting ||= Boolean(record.nodes);
        return asked;
    };
}"""
HELD_DRAFT = """
window.__isHeld = true;
const getAll = IDBObjectStore.prototype.getAll;
IDBObjectStore.prototype.getAll = function (range) {
    const asked = getAll.call(this, range);
    const wait = () => { if (window.__isHeld) getAll.call(this, range).onsuccess = wait; };
    if (range?.lower.startsWith("draft/")) wait();
    return asked;
};"""
RELEASED = """async () => {
    window.__isHeld = false;
    for (let times = 0; times < 3; times += 1) await new Promise((done) => {
        const asked = indexedDB.open("mlx-serve", 1);
        asked.onsuccess = () => {
            const transaction = asked.result.transaction("conversations", "readwrite");
            transaction.objectStore("conversations").get(0);
            transaction.oncomplete = () => (asked.result.close(), done());
        };
    });
}"""
"""Lets the browser go on, and waits until it has done all that it was asked for."""


@pytest.fixture
def chats(page: Page, address: str) -> Page:
    """A new page of a browser that keeps two chats, "The first" and "The second"."""
    open_chat(page, address)
    for text in ("The first", "The second"):
        page.get_by_role("button", name="New chat").click()
        say(page, text)
    wait_until_kept(
        page,
        "(all) => all.filter((one) => one.nodes && !Object.values(one.nodes).some((node) => node.run)).length === 2",
    )
    page.get_by_role("button", name="New chat").click()
    page.reload()
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    return page


def test_the_chat_that_was_chosen_last_is_shown_however_long_another_takes(chats: Page) -> None:
    chats.evaluate(f"() => {{ {HELD_READ} }}")
    chats.get_by_role("link", name="The first").click()
    chats.wait_for_function("() => window.__isReading")
    chats.get_by_role("link", name="The second").click()
    question = chats.locator(".message.user")
    expect(question).to_contain_text("The second")
    chats.evaluate(RELEASED)
    expect(question).to_contain_text("The second")


def test_what_is_written_before_a_chat_is_read_is_for_that_chat(chats: Page) -> None:
    chats.get_by_role("link", name="The first").click()
    expect(chats.locator(".message.user")).to_contain_text("The first")
    chats.add_init_script(HELD_READ)
    chats.reload()
    chats.wait_for_function("() => window.__isReading")
    field = chats.get_by_label("Message", exact=True)
    field.fill("And then?")
    field.press("Enter")
    chats.evaluate(RELEASED)
    expect(chats.locator(".message.user")).to_have_text(["YouThe firstCopyEdit", "YouAnd then?CopyEdit"])
    expect(chats.locator(".chats li")).to_have_count(2)


def test_settings_are_shown_once_it_is_known_of_which_chat(page: Page, address: str) -> None:
    page.add_init_script(f"{HELD_DRAFT} window.__held = 'v1/models';")
    page.goto(f"{address}/#/chat/new")
    wait_until_held(page)
    let_go(page)
    assert page.locator(".options label").count() == 0
    page.evaluate(RELEASED)
    expect(page.get_by_role("combobox", name="Model", exact=True)).to_have_value("tiny")


def test_an_address_stays_that_of_the_chat_that_was_chosen_last(chats: Page) -> None:
    chats.evaluate(HELD_WRITE)
    field = chats.get_by_label("Message", exact=True)
    field.fill("The third")
    field.press("Enter")
    chats.wait_for_function("() => window.__isWriting")
    second = chats.get_by_role("link", name="The second")
    second.click()
    chats.evaluate(RELEASED)
    expect(chats.locator(".message.user")).to_contain_text("The second")
    assert chats.evaluate("() => location.hash") == second.get_attribute("href")


HELD_FILE = """() => {
    const asUrl = FileReader.prototype.readAsDataURL;
    FileReader.prototype.readAsDataURL = function (file) { window.__readImage = () => asUrl.call(this, file); };
}"""


def test_a_message_waits_for_its_files(page: Page, address: str) -> None:
    open_chat(page, address)
    seeing(page)
    page.evaluate(HELD_FILE)
    give(page, "paste", "shot.png", "image/png", PNG)
    page.wait_for_function("() => window.__readImage !== undefined")
    field = page.get_by_label("Message", exact=True)
    field.fill("What is this?")
    field.press("Enter")
    page.evaluate("() => window.__readImage()")
    expect(page.locator(".message.user .files li")).to_have_count(1)
    expect(page.locator(".attached li")).to_have_count(0)


def test_files_are_not_for_the_chat_that_is_shown_once_they_are_read(page: Page, address: str) -> None:
    open_chat(page, address)
    seeing(page)
    say(page, "Hello")
    page.evaluate(HELD_FILE)
    give(page, "paste", "shot.png", "image/png", PNG)
    page.wait_for_function("() => window.__readImage !== undefined")
    page.get_by_role("button", name="New chat").click()
    page.evaluate("() => window.__readImage()")
    expect_toast(page, "The files were not added: another chat is shown now.")
    expect(page.locator(".attached li")).to_have_count(0)


def test_a_preset_that_could_not_be_kept_is_not_said_to_be(page: Page, address: str) -> None:
    open_chat(page, address)
    page.evaluate(
        "() => { IDBObjectStore.prototype.put = () => { throw new DOMException('full', 'QuotaExceededError'); }; }"
    )
    page.get_by_text("System message and settings").click()
    page.get_by_label("Keep these as").fill("terse")
    page.get_by_role("button", name="Keep", exact=True).click()
    expect_toast(page, "The browser has no room left.")
    assert page.evaluate("() => window.__said.length") == 1
