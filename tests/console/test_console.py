"""The console in a real Chromium: every view with live traffic, and nothing that a page must not do."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect

from server.api.admin.console import SOURCE
from server.api.app import create_pool_app
from server.api.sessions import MAX_TURNS
from server.app.config import ServerConfig
from server.app.service import open_service
from server.diagnosis.causes import MissReason
from server.pool.pool import ModelPool
from tests.console.hostile import BARE, TEXTS
from tests.support.apps import create_app
from tests.support.browser import BROWSER, NOTING_TOASTS, expect_toast
from tests.support.fake_engine import DRAFTS, FakeEngine, Script, fake_model
from tests.support.fake_hub import running_hub
from tests.support.live_server import running
from tests.support.pulling_server import serving_beside
from tests.support.tiny_models import write

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium was found; CHROMIUM may name one")

SYSTEM = {"role": "system", "content": "You are a careful assistant. You answer in one short sentence. " * 4}
ADA = {"role": "user", "content": "My name is Ada and I live in Paris."}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of the demo model, with a disk tier."""
    folder = str(tmp_path_factory.mktemp("cache"))
    config = ServerConfig(models=("demo",), cache_disk_bytes=1 << 28, cache_dir=folder, slots=3)
    service = open_service(config)
    service.engine.start()
    try:
        with running(create_pool_app(ModelPool.of(service.opened), config)) as address:
            yield address
    finally:
        service.engine.stop()


class Watched:
    """What a page did that it must not do."""

    def __init__(self, context: BrowserContext, address: str) -> None:
        self.problems: list[str] = []
        self._address = address
        self._context = context
        self._listeners = {"request": self._note_request, "console": self._note_line, "weberror": self._note_error}
        for name, listener in self._listeners.items():
            context.on(name, listener)  # type: ignore[call-overload]

    def end(self) -> None:
        for name, listener in self._listeners.items():
            self._context.remove_listener(name, listener)

    def _note_error(self, error: Any) -> None:
        self.problems.append(str(error.error))

    def _note_line(self, line: Any) -> None:
        # Chromium writes a line for each answer that refuses something, which the page shows as a sentence.
        is_refusal = re.search(r"status of 40[04]", line.text) and line.location["url"].endswith("/api/pull")
        if line.type == "error" and not is_refusal:
            self.problems.append(f"{line.text} {line.location['url']}")

    def _note_request(self, request: Any) -> None:
        if not request.url.startswith((self._address, "blob:", "data:")):
            self.problems.append(f"asked {request.url}")


@pytest.fixture
def page(demo: str, context: BrowserContext) -> Iterator[Page]:
    """A page of its own; at its end nothing may have gone wrong in it."""
    watched = Watched(context, demo)
    yield context.new_page()
    watched.end()
    assert watched.problems == []


def ask(address: str, *messages: Any, **fields: Any) -> Any:
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, **fields}
    answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def open_chat(page: Page, address: str) -> None:
    """Shows a new chat, and waits until it takes messages."""
    page.goto(f"{address}/#/chat/new")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()


def say(page: Page, text: str) -> None:
    """Sends a message and waits for the end of its answer."""
    before = page.locator(".message.assistant").count()
    field = page.get_by_label("Message", exact=True)
    field.fill(text)
    field.press("Enter")
    expect(page.locator(".message.assistant")).to_have_count(before + 1)
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()


def test_now_shows_what_was_saved_and_the_first_steps_work(page: Page, demo: str) -> None:
    page.goto(demo)
    expect(page.locator(".headline")).to_be_visible()
    if page.get_by_role("button", name="Two chats").count():
        page.get_by_role("button", name="Two chats").click()
        expect(page.locator(".said").first).to_contain_text("tokens reused. Bob:")
        page.get_by_role("button", name="An edit that branches").click()
        expect(page.locator(".said").nth(1)).to_contain_text("Second:")
    ask(demo, SYSTEM, ADA)
    expect(page.locator(".headline")).to_contain_text("Tokens not evaluated again")
    expect(page.locator(".lane.idle").last).to_contain_text("idle")
    expect(page.locator(".view.now")).to_contain_text("The last 15 minutes")
    assert page.title() == "Now · mlx-serve"


def test_a_tab_that_is_not_shown_gives_its_connection_up(page: Page, demo: str) -> None:
    def show(is_hidden: bool) -> None:
        page.evaluate(
            "hidden => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });"
            " document.dispatchEvent(new Event('visibilitychange')); }",
            is_hidden,
        )

    with page.expect_request("**/v1/events"):
        page.goto(demo)
    page.get_by_text("slots answer").wait_for()
    with page.expect_event("requestfailed", lambda request: request.url.endswith("/v1/events")):
        show(True)
    with page.expect_request("**/v1/events"):
        show(False)


def test_a_running_request_has_a_lane(page: Page, demo: str) -> None:
    page.goto(demo)
    page.get_by_text("slots answer").wait_for()
    with httpx.stream(
        "POST", f"{demo}/v1/chat/completions", timeout=120,
        json={"messages": [ADA], "stream": True, "max_tokens": 20_000, "ignore_eos": True, "session_id": "lane"},
    ) as answer:  # fmt: skip
        pieces = answer.iter_bytes()
        next(pieces)
        lane = page.locator(".lane:not(.idle)")
        expect(lane).to_contain_text("lane")
        expect(lane).to_contain_text("tokens")
    # Its row stays for a while.
    expect(page.locator(".lane").first).to_have_text(re.compile(r"^\didle$"))
    expect(page.locator(".lane:not(.idle)")).to_have_count(0)


def test_the_tree_is_walked_with_the_keyboard(page: Page, demo: str) -> None:
    ask(demo, SYSTEM, ADA, session_id="tree-one")
    ask(demo, SYSTEM, {"role": "user", "content": "My name is Bob and I live in Rome."}, session_id="tree-two")
    page.goto(f"{demo}/#/tree")
    expect(page.get_by_role("heading", name="Whose it is")).to_be_visible()
    canvas = page.locator("canvas")
    canvas.focus()
    found = ""
    for key in ("ArrowDown", *["ArrowRight"] * 3, "ArrowDown", *["ArrowRight"] * 3):
        canvas.press(key)
        found += page.locator("aside blockquote").inner_text()
    assert "You are a careful assistant" in found
    expect(page.locator(".view.tree aside")).to_contain_text("Evaluating it again")
    canvas.press("Enter")
    expect(page.get_by_role("navigation", name="Way from the root")).to_be_visible()
    canvas.press("Escape")
    page.locator(".users button").first.click()
    expect_toast(page, " stays.")


def test_the_tree_says_whose_it_is(page: Page, demo: str) -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "description": "Tells. " * 20, "parameters": {}}}
    ask(demo, ADA)
    for name, question in (("coder", "Where is the violet door?"), ("planner", "Who paints it?")):
        ask(
            demo,
            SYSTEM,
            {"role": "user", "content": question},
            session_id=name,
            tools=[tool],
            user="x",
            cache_salt="w",
        )
    page.goto(f"{demo}/#/tree")
    page.get_by_label("Namespace").select_option("/w")
    chips = page.locator(".whose")
    expect(chips).to_contain_text("coder")
    expect(chips).to_contain_text("Who paints it?")
    canvas, side = page.locator("canvas"), page.locator(".view.tree aside")
    canvas.press("ArrowDown")
    expect(side.get_by_role("heading").first).to_have_text("system message, tools (1)of planner and 1 more")
    canvas.press("ArrowDown")
    expect(side.get_by_role("heading").first).to_contain_text(re.compile("of (coder|planner)$"))
    for text in ("VIOLET door", "careful assistant"):
        with page.expect_response("**/v1/cache/search?*"):
            page.get_by_label("Search").fill(text)
        expect(page.get_by_text("The text is in 1 place.")).to_be_visible()
    ask(demo, SYSTEM, ADA, session_id="later", cache_salt="w")
    expect(chips).to_contain_text("later")
    page.get_by_label("Time").press("Home")
    expect(page.locator(".changes")).to_contain_text("came")
    page.get_by_label("Time").press("End")
    expect(page.locator(".changes")).to_have_count(0)


MADE_UP = """async (count) => {
    const { view } = await import("/console/views/tree.js");
    const root = document.createElement("section");
    root.className = "view tree";
    document.getElementById("main").replaceChildren(root);
    const name = (id) => ({ sessions: [`s${id % 40}`], num_sessions: 1, first: 0, last: 0, role: "user", tools: 0, text: "words" });
    const nodes = Array.from({ length: count }, (_, at) => {
        const [id, parent] = [at + 1, at < 50 ? null : 1 + Math.floor(at / 50)];
        return { id, parent, start: 0, stop: 50, tokens: 50, bytes: 9, tier: "memory", uses: 1, disk_tokens: 0, preview: "x", name: name(id) };
    });
    const sessions = Array.from({ length: 40 }, (_, id) => ({ id: `s${id}`, title: "t", question: "q" }));
    const app = { api: { get: () => new Promise(() => {}) }, live: { subscribe() {}, stats: null, changes: 0 }, toast() {} };
    const control = view.mount(root, app);
    control.show();
    control.paintNow({ nodes, disk_nodes: [], namespace: "", model: "m", num_nodes: count, namespaces: null, truncated: false, sessions, earlier: [1, 2], evictions: 0 });
    let calls = 0;
    for (const name of ["fillRect", "fillText", "strokeRect", "drawImage"]) {
        const real = CanvasRenderingContext2D.prototype[name];
        CanvasRenderingContext2D.prototype[name] = function (...given) { calls += 1; return real.apply(this, given); };
    }
    control.paintNow();
    return { calls, elements: root.querySelectorAll("*").length };
}"""


def test_a_frame_of_five_thousand_edges_is_that_of_five_hundred(page: Page, demo: str) -> None:
    figures = []
    for count in (500, 5000):
        page.goto("about:blank")
        page.goto(f"{demo}/#/models")
        page.locator(".models li").first.wait_for()
        figures.append(page.evaluate(MADE_UP, count))
    small, large = figures
    assert 0 < large["calls"] <= 2 * small["calls"] and large["calls"] < 10
    assert large["elements"] == small["elements"] < 200


def test_texts_on_the_colours_of_sessions_can_be_read(page: Page, demo: str) -> None:
    page.goto(demo)
    found = page.evaluate(
        """async () => {
            const { colour } = await import("/console/lib/names.js");
            const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
            const seen = (fill) => { pen.fillStyle = fill; pen.fillRect(0, 0, 1, 1); return "#" + [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3).map((one) => one.toString(16).padStart(2, "0")).join(""); };
            const hues = [null, ...Array.from({ length: 72 }, (_, at) => 5 * at)];
            return hues.flatMap((hue) => [true, false].flatMap((isDark) => ["live", "memory", "disk"].map((tier) => { const { fill, ink } = colour(tier, hue, isDark); return [seen(fill), ink]; })));
        }"""
    )
    assert len(found) == 73 * 6
    assert min(contrast(fill, ink) for fill, ink in found) >= 4.5


def test_names_of_the_tree_stay_texts(page: Page, demo: str) -> None:
    for text in BARE[:6]:
        ask(
            demo,
            {"role": "system", "content": text},
            {"role": "user", "content": text},
            session_id=text,
            cache_salt="h",
        )
    page.goto(f"{demo}/#/tree")
    page.get_by_label("Namespace").select_option("/h")
    expect(page.locator(".whose li")).to_have_count(6)
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "Enter"):
        page.locator("canvas").press(key)
    expect(page.locator(".view.tree aside blockquote")).to_be_visible()
    harmless(page)


def test_ten_thousand_edges_are_drawn(page: Page, demo: str) -> None:
    page.goto(f"{demo}/#/tree")
    page.locator("canvas").wait_for()
    drawn = page.evaluate(
        """async () => {
            const { boxesOf, treeOf } = await import("/console/lib/icicle.js");
            const node = (id, parent, start) => ({ id, parent, start, stop: start + 50, tokens: 50, bytes: 9, tier: "memory", preview: "x" });
            const nodes = [];
            for (let id = 1; id <= 10000; id += 1) nodes.push(node(id, id <= 100 ? null : Math.floor(id / 10), 0));
            const tree = treeOf({ nodes, disk_nodes: [] }, (one, tokens) => tokens);
            const boxes = boxesOf(tree, 900, 400);
            return { boxes: boxes.length, edges: boxes.reduce((all, one) => all + (one.edge ? 1 : one.count), 0), count: tree.count,
                     right: Math.max(...boxes.map((one) => one.x + one.width)) };
        }"""
    )
    assert drawn["count"] == 10_001 and drawn["boxes"] < 4000 and drawn["right"] <= 900.001
    assert drawn["edges"] == 10_001, "what is too narrow is drawn together, and counted"


def test_what_is_only_on_disk_hangs_where_memory_ends(page: Page, demo: str) -> None:
    page.goto(demo)
    tree = page.evaluate(
        """async () => {
            const { treeOf } = await import("/console/lib/icicle.js");
            const cache = {
                nodes: [{ id: 7, parent: null, start: 0, stop: 100, tokens: 100, bytes: 1, tier: "live", preview: "a", disk_tokens: 100 }],
                disk_nodes: [
                    { id: 1, parent: null, start: 0, stop: 160, tokens: 160, bytes: 160, preview: "a", memory_tokens: 100, memory_id: 7 },
                    { id: 2, parent: 1, start: 160, stop: 200, tokens: 40, bytes: 40, preview: "b", memory_tokens: 0, memory_id: 7 },
                    { id: 3, parent: null, start: 0, stop: 30, tokens: 30, bytes: 30, preview: "c", memory_tokens: 0, memory_id: null },
                ],
            };
            const said = (edge) => ({ key: edge.key, tokens: edge.tokens, start: edge.start, children: edge.children.map(said) });
            return said(treeOf(cache, (one, tokens) => tokens)).children;
        }"""
    )
    memory, other = tree
    assert memory["key"] == "m7" and other["key"] == "d3" and other["tokens"] == 30
    (rest,) = memory["children"]
    assert (rest["key"], rest["tokens"], rest["start"]) == ("d1", 60, 100)
    assert [one["key"] for one in rest["children"]] == ["d2"]


def test_a_session_shows_its_turns_and_the_words_that_changed(page: Page, demo: str) -> None:
    long = [{"role": "user", "content": f"Remember the number {number}."} for number in range(30)]
    turns = [SYSTEM, *[one for user in long for one in (user, {"role": "assistant", "content": "Yes."})]]
    ask(demo, *turns, ADA, session_id="edited")
    changed = [*turns]
    changed[5] = {"role": "user", "content": "Remember the word violet."}
    ask(demo, *changed, ADA, session_id="edited")
    page.goto(f"{demo}/#/sessions")
    page.get_by_role("link", name="edited").click()
    expect(page.locator(".turns li")).to_have_count(2)
    expect(page.locator(".words ins").first).to_contain_text("violet")
    expect(page.locator(".advice")).to_be_visible()
    page.get_by_role("button", name="Pin", exact=True).click()
    expect(page.get_by_role("button", name="Unpin")).to_be_visible()
    assert "edited" in httpx.get(f"{demo}/v1/cache?limit=0").json()["pinned_sessions"]
    page.get_by_role("button", name="Unpin").click()
    expect(page.get_by_role("button", name="Pin", exact=True)).to_be_visible()
    page.get_by_role("button", name="Forget").click()
    expect(page).to_have_url(re.compile("#/sessions$"))
    assert httpx.get(f"{demo}/v1/sessions/edited").status_code == 404


def test_the_last_turns_of_a_long_session_have_their_numbers(page: Page, demo: str) -> None:
    for _ in range(MAX_TURNS + 1):
        ask(demo, ADA, session_id="long")
    page.goto(f"{demo}/#/sessions/long")
    expect(page.locator(".turns li")).to_have_count(MAX_TURNS)
    expect(page.locator(".turns h3").first).to_contain_text(f"Turn {MAX_TURNS + 1}")
    expect(page.locator(".turns h3").last).to_contain_text("Turn 2")


def test_the_owner_sees_what_clients_with_a_key_of_their_own_have(page: Page, demo: str) -> None:
    for key in ("mine", "theirs"):
        body = {"messages": [SYSTEM, ADA], "max_tokens": 2, "session_id": "same name"}
        httpx.post(f"{demo}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=120)
    ids = {one["namespace"] for one in httpx.get(f"{demo}/v1/sessions").json()["data"] if one["id"] == "same name"}
    assert len(ids) == 2
    page.goto(f"{demo}/#/sessions")
    links = page.get_by_role("link", name="same name")
    expect(links).to_have_count(2)
    for place in (0, 1):
        links.nth(place).click()
        expect(page.locator(".turns li")).to_have_count(1)
        page.goto(f"{demo}/#/sessions")
    page.goto(f"{demo}/#/tree")
    page.get_by_label("Namespace").select_option(ids.pop())
    expect(page.locator(".whose")).to_contain_text("same name")
    expect(page.locator(".view.tree")).not_to_contain_text("Nothing is held yet")


def test_a_pin_is_that_of_the_session_s_model(page: Page, demo: str) -> None:
    key = {"Authorization": "Bearer of the pins"}
    body = {"messages": [ADA], "max_tokens": 2, "session_id": "pinned"}
    httpx.post(f"{demo}/v1/chat/completions", json=body, headers=key, timeout=120).raise_for_status()
    httpx.post(f"{demo}/v1/sessions/pinned/pin", headers=key, timeout=120).raise_for_status()
    page.goto(f"{demo}/#/sessions")
    with page.expect_request(re.compile("/v1/cache.*model=demo")):
        page.get_by_role("link", name="pinned", exact=True).click()
    with page.expect_request(re.compile("/unpin.*model=demo")):
        page.get_by_role("button", name="Unpin").click()
    expect(page.get_by_role("button", name="Pin", exact=True)).to_be_visible()


def test_a_chat_leads_to_its_own_tree_when_another_was_shown(page: Page, demo: str) -> None:
    body = {"messages": [SYSTEM, ADA], "max_tokens": 2, "session_id": "of a key"}
    key = {"Authorization": "Bearer of the tree"}
    httpx.post(f"{demo}/v1/chat/completions", json=body, headers=key, timeout=120).raise_for_status()
    sessions = httpx.get(f"{demo}/v1/sessions").json()["data"]
    (namespace,) = (one["namespace"] for one in sessions if one["id"] == "of a key")
    open_chat(page, demo)
    say(page, "Where is the violet door?" + " Tell me more of it." * 30)
    page.route("**/v1/cache?*", lambda _: None)  # until it is no longer routed
    page.goto(f"{demo}/#/tree")
    expect(page.get_by_text("Asking the server …")).to_be_visible()
    page.unroute("**/v1/cache?*")
    page.get_by_label("Namespace").select_option(namespace)
    expect(page.locator(".whose")).to_contain_text("of a key")
    page.goto(f"{demo}/#/chat")
    page.get_by_role("link", name="in the tree").click()
    expect(page.get_by_label("Namespace")).to_have_value("")
    expect(page.locator(".whose [aria-pressed=true]")).to_contain_text("Where is the violet door?")


def test_every_reason_is_said_in_words() -> None:
    said = (SOURCE / "views" / "now.js").read_text().partition("const REASONS = {")[2].partition("};")[0]
    assert set(re.findall(r"^  (\w+): ", said, re.MULTILINE)) == {*MissReason} - {MissReason.COLD}


def test_requests_are_a_waterfall_that_can_be_filtered(page: Page, demo: str) -> None:
    page.goto(f"{demo}/#/requests")
    page.get_by_label("Session or id").wait_for()
    for name in ("fall-one", "fall-two"):
        ask(demo, ADA, session_id=name)
        expect(page.get_by_role("button", name=name)).to_be_visible()
    page.get_by_label("Session or id").fill("two")
    expect(page.get_by_role("button", name="fall-one")).to_have_count(0)
    page.get_by_role("button", name="fall-two").first.click()
    expect(page.locator("tr.details")).to_contain_text("/v1/chat/completions")
    expect(page.locator("tr.details")).to_contain_text("temperature 0, at most 12 tokens")
    page.get_by_label("Status").select_option("failed")
    expect(page.get_by_text("No request is like that.")).to_be_visible()


def test_requests_of_before_the_page_are_drawn_as_they_were(page: Page, demo: str) -> None:
    for name in ("before-one", "before-two"):
        ask(demo, SYSTEM, ADA, session_id=name)
    page.goto(f"{demo}/#/requests")
    rows = page.locator(".waterfall tbody tr")
    expect(rows.first).to_contain_text("before-two")
    expect(rows.nth(1)).to_contain_text("before-one")
    cells = rows.first.locator("td")
    expect(cells.nth(3)).to_have_text(re.compile(r"^(\d.{2,}|[5-9]\d)$"))
    expect(cells.nth(4)).to_have_text(re.compile("%$"))
    expect(rows.first.locator("rect.decode")).not_to_have_attribute("width", "0.00")
    expect(rows.first.locator("title")).to_contain_text("generating")
    page.goto(f"{demo}/#/now")
    expect(page.locator(".view.now .charts")).to_contain_text("are known")
    first = page.locator(".chart polyline").first
    expect(first).to_have_attribute("points", re.compile(r"(\S+ ){3}"))


def test_a_wait_says_what_it_is_for(chromium: Browser) -> None:
    context, wait = chromium.new_context(), dict[str, Any]()
    with running(create_app(FakeEngine(), fake_model(), ServerConfig())) as address:
        page, stats = context.new_page(), httpx.get(f"{address}/v1/stats").json()
        counts = dict.fromkeys(("cached_tokens", "evaluated_tokens", "completion_tokens"), 0)
        one: dict[str, Any] = {
            "id": "r1",
            "model": "m",
            "namespace": "",
            "phase": "waiting",
            "slot": None,
            "seconds": 2,
            "tier": None,
        }
        one |= {"session_id": "agent-coder", "prompt_tokens": 1413, "waits_for": wait, **counts}
        page.route("**/v1/stats", lambda route: route.fulfill(json={**stats, "requests": [one]}))
        other = {"id": "r0", "session_id": "unnamed-9aee647c", "title": "Which river?", "received": 1, "ended": 2}
        page.route("**/v1/requests", lambda route: route.fulfill(json={"data": [other], "levels": []}))
        page.goto(address)
        expect(page.get_by_text("8 idle slots")).to_be_visible()
        waits = {
            (
                "beginning",
                "agent-planner",
                1280,
                1413,
            ): "for agent-planner’s beginning, 1\u202f280 of 1\u202f413 tokens",
            ("beginning", "unnamed-9aee647c", 1, 2): "for “Which river?”’s beginning",
            ("beginning", "unnamed-00000000", 1, 2): "for unnamed’s beginning",
            ("answer", "agent-planner", 0, 0): "for agent-planner’s answer, which it goes on from",
            ("slot", None, 0, 0): "for a slot: all of them answer others",
            ("memory", None, 0, 0): "for memory",
            ("model", None, 0, 0): "for its model to be loaded",
        }
        for told, said in waits.items():
            wait.update(zip(("reason", "session_id", "evaluated", "total"), told, strict=True))
            expect(page.locator(".queue")).to_contain_text(said)
        context.close()


def test_sessions_are_searched_sorted_and_grouped(page: Page, demo: str) -> None:
    for name, number in (("sorted-b", 3), ("sorted-a", 1)):
        for _ in range(number):
            ask(demo, {"role": "user", "content": f"Where is the mauve {name}?"}, session_id=name)
    page.goto(f"{demo}/#/sessions")
    page.get_by_label("Search").fill("MAUVE")
    rows = page.locator(".sessions tbody tr[data-key]")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("sorted-a")
    expect(rows.first).to_contain_text("“Where is the mauve sorted-a?” · demo · python-httpx")
    page.get_by_role("button", name="Turns").click()
    expect(rows.first).to_contain_text("sorted-b")
    page.get_by_role("button", name="Turns").click()
    expect(rows.first).to_contain_text("sorted-a")
    page.get_by_label("Group by").select_option("model")
    expect(page.locator(".sessions .group")).to_have_text("demo2 sessions")
    expect(page.get_by_text("how much of the turn before the last one")).to_be_visible()
    page.set_viewport_size({"width": 390, "height": 844})
    assert problems_of(page) == ""
    cells = page.locator(".sessions tbody td:visible")
    heights = [cells.nth(at).evaluate("(cell) => cell.firstChild && (() => { const range = document.createRange(); range.selectNodeContents(cell); return range.getClientRects().length; })()") for at in range(cells.count())]  # fmt: skip
    assert heights and max(heights) <= 2, "figures break at blanks only"


def test_only_the_words_that_changed_are_struck_out(page: Page, demo: str) -> None:
    clock = (
        "You are the helper of a town. It is {} now. Be brief and kind to everybody. " + "Say what you know. " * 30
    )
    for time in ("9:21", "9:22"):
        ask(demo, {"role": "system", "content": clock.format(time)}, ADA, session_id="clock")
    page.goto(f"{demo}/#/sessions/clock")
    expect(page.locator(".words del")).to_have_text(["21"])
    expect(page.locator(".words ins")).to_have_text(["22"])
    expect(page.locator(".miss").first).to_contain_text("in the system message")


def test_models_are_listed_and_a_pull_that_fails_says_why(page: Page, demo: str) -> None:
    page.goto(f"{demo}/#/models")
    expect(page.locator(".models li.loaded")).to_contain_text("demo")
    page.get_by_label("Search").fill("nowhere")
    expect(page.get_by_text("No model here is called so.")).to_be_visible()
    page.get_by_label("Search").fill("DEMO")
    expect(page.get_by_role("status").filter(has_text="1 model here, ")).to_be_visible()
    page.get_by_label("Another model").fill("nonsense")
    page.get_by_role("button", name="Pull", exact=True).click()
    expect(page.locator(".panel .bad")).to_contain_text("'nonsense': give a repository org/name, or a short name")
    page.get_by_role("button", name="Dismiss").click()
    expect(page.locator(".panel .bad")).to_have_count(0)


def test_a_name_of_ones_own_adds_no_weights(page: Page, demo: str) -> None:
    def name_another(route: Route) -> None:
        answer = route.fetch()
        body = answer.json()
        models = body["data" if "data" in body else "models"]
        first = next(one for one in models if "demo" in (one.get("id"), one.get("name", "").removesuffix(":latest")))
        models.append({**first, "id": "writer", "name": "writer:latest", "parent": "demo"})
        route.fulfill(response=answer, json=body)

    total = page.get_by_role("status").filter(has_text=" here, ")
    page.goto(f"{demo}/#/models")
    size = total.inner_text().split(" here, ")[1]
    for address in ("**/v1/models", "**/api/tags"):
        page.route(address, name_another)
    page.reload()
    expect(page.locator(".models li").filter(has_text="writer")).to_be_visible()
    expect(total).to_have_text(re.compile(f"^2 models here, {re.escape(size)}$"))


def test_what_fits_this_machine_is_marked(page: Page, demo: str) -> None:
    def told(route: Route) -> None:
        body = route.fetch().json()
        smallest, middle, *_ = sorted({one["size_bytes"] for one in body["data"] if one["id"].startswith("qwen3:")})
        route.fulfill(json={**body, "comfortable_bytes": smallest, "largest_bytes": middle})

    page.route("**/v1/library", told)
    page.goto(f"{demo}/#/models")
    page.get_by_label("Search").fill("qwen3:")
    sizes = page.locator(".library button")
    expect(sizes.first).to_have_class("fits")
    expect(sizes.and_(page.locator(".tight")).first).to_have_attribute(
        "title", re.compile("little memory for convers")
    )
    too_large = sizes.and_(page.locator(".large")).first
    expect(too_large).to_have_attribute("aria-disabled", "true")
    too_large.dispatch_event("click")
    expect(page.locator(".pulling")).to_have_count(0)


def test_a_model_is_deleted_by_its_whole_name(page: Page, demo: str) -> None:
    deleted = list[str]()

    def told(route: Route) -> None:
        deleted.append(route.request.url.removeprefix(demo))
        route.fulfill(json={})

    listed = [{"id": name, "object": "model", "loaded": False} for name in ("poet", "poet#2", "org/name@v1")]
    listed[1]["parent"] = "demo"
    page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": listed}))
    page.route("**/v1/models/*", told)
    page.route("**/v1/models/*/*", told)
    page.goto(f"{demo}/#/models")
    for name in ("poet#2", "org/name@v1"):
        page.get_by_role("button", name=f"Delete {name}").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        expect_toast(page, f"{name} is gone.")
    assert deleted == ["/v1/models/poet%232", "/v1/models/org/name%40v1"]


@pytest.mark.usual
def test_a_model_is_pulled_loaded_asked_unloaded_and_deleted(chromium: Browser, tmp_path: Path) -> None:
    model = write("llama", tmp_path / "model")
    with running_hub() as hub, serving_beside(hub, tmp_path / "home") as address:
        files = {file.name: file.read_bytes() for file in model.iterdir()}
        hub.repositories |= {"org/tiny": files, "mlx-community/Qwen3-0.6B-4bit": files}
        hub.pause_after_bytes = 10_000
        context = chromium.new_context()
        context.add_init_script(NOTING_TOASTS)
        watched = Watched(context, address)
        page = context.new_page()
        page.goto(f"{address}/#/models")
        page.get_by_label("Another model").fill("org/tiny")
        page.get_by_role("button", name="Pull", exact=True).click()
        expect(page.get_by_role("progressbar", name="Pulling org/tiny")).to_be_visible()
        hub.pause_after_bytes = None
        hub.resume.set()
        expect_toast(page, "org/tiny is here.")
        pulled = page.locator(".models li").filter(has_text="org/tiny")
        expect(pulled).to_contain_text("on disk")
        pulled.get_by_role("button", name="Load").click()
        expect(pulled).to_contain_text("loaded, ")
        pulled.get_by_role("link", name="Chat").click()
        expect(page.get_by_role("combobox", name="Model")).to_have_value("org/tiny")
        say(page, "Hello!")
        page.goto(f"{address}/#/models")
        expect(pulled).to_contain_text(re.compile(r"[1-9]\d* edges?,"))
        expect(pulled.get_by_role("button", name="Delete")).to_have_count(0)
        pulled.get_by_role("button", name="Unload").click()
        expect(pulled).to_contain_text("on disk")
        listed = page.get_by_role("button", name="Pull qwen3:0.6b,")
        listed.click()
        expect_toast(page, "qwen3:0.6b is here.")
        expect(listed).to_contain_text("here")
        pulled.get_by_role("button", name="Delete").click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
        expect(pulled).to_have_count(1)
        pulled.get_by_role("button", name="Delete").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        expect_toast(page, "org/tiny is gone.")
        expect(pulled).to_have_count(0)
        assert list((tmp_path / "home").rglob("models--org--tiny/snapshots/*")) == []
        context.close()
    assert watched.problems == []


def test_a_chat_streams_branches_and_is_kept(page: Page, demo: str) -> None:
    open_chat(page, demo)
    say(page, "My name is Ada and I live in Paris.")
    say(page, "What is my name?")
    expect(page.locator(".message.assistant footer").last).to_contain_text(re.compile(r"reused \d+ of \d+ tokens"))
    page.locator(".message.user").last.get_by_role("button", name="Edit").click()
    editor = page.get_by_label("Edit the message")
    editor.fill("Where do I live?")
    page.get_by_role("button", name="Send as another way").click()
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    user = page.locator(".message.user").last
    expect(user).to_contain_text("2/2")
    expect(page.locator(".message.assistant").last).to_contain_text("Paris")
    user.get_by_role("button", name="Earlier way").click()
    expect(page.locator(".message.user").last).to_contain_text("What is my name?")
    expect(page.locator(".message.assistant").last).to_contain_text("Ada")
    page.locator(".message.assistant").last.get_by_role("button", name="Again").click()
    expect(page.locator(".message.assistant").last).to_contain_text("2/2")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    expect(page).to_have_url(re.compile(r"#/chat/[0-9a-f-]{36}$"))
    page.reload()
    expect(page.locator(".message.user").last).to_contain_text("What is my name?")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    exported = json.loads(Path(download.value.path()).read_text())
    assert exported["format"] == "mlx-serve-chat" and len(exported["nodes"]) == 7
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".message")).to_have_count(0)
    page.locator(".chats input[type=file]").set_input_files(download.value.path())
    expect(page.locator(".message")).to_have_count(4)


def test_the_strip_of_a_chat_leads_to_its_path_in_the_tree(page: Page, demo: str) -> None:
    open_chat(page, demo)
    say(page, "Where is the violet door?" + " Tell me more of it." * 30)
    say(page, "And then?")
    expect(page.locator(".strip")).to_contain_text(re.compile(r"reused, .* generated, about .* saved"))
    page.get_by_role("link", name="in the tree").click()
    own = page.locator(".whose [aria-pressed=true]")
    expect(own).to_have_text(re.compile("Where is the violet door"))
    page.get_by_role("link", name="Chat").click()
    expect(page.locator(".message.user").last).to_contain_text("And then?")


def test_a_chat_by_keyboard_alone(page: Page, demo: str) -> None:
    page.goto(demo)
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "Chat":
            break
    page.keyboard.press("Enter")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.type("My name is Bob and I live in Rome.")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant")).to_have_count(1)
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    page.keyboard.press("ArrowUp")
    expect(page.get_by_label("Edit the message")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()


def test_a_key_is_asked_for_once(chromium: Browser) -> None:
    app = create_app(FakeEngine(), fake_model(), ServerConfig(api_key="sesame"))
    with running(app) as address:
        context = chromium.new_context()
        page = context.new_page()
        page.clock.install()
        page.goto(address)
        page.get_by_role("button", name="Not now").click()
        for _ in range(2):
            with page.expect_response("**/v1/stats"):
                page.clock.fast_forward(10_000)
        expect(page.get_by_role("dialog")).to_have_count(0)
        page.get_by_role("button", name="Give a key").click()
        for given in ("wrong", "sesame"):
            page.get_by_label("Key", exact=True).fill(given)
            page.get_by_role("button", name="Use it").click()
        expect(page.locator(".headline")).to_be_visible()
        page.goto(f"{address}/#/sessions")
        expect(page.get_by_text("No conversation yet")).to_be_visible()
        page.reload()
        expect(page.get_by_text("No conversation yet")).to_be_visible()
        context.close()


def test_a_key_that_is_given_late_is_used_by_what_is_shown(chromium: Browser) -> None:
    app = create_app(FakeEngine(), fake_model(), ServerConfig(api_key="sesame"))
    with running(app) as address:
        context = chromium.new_context()
        page = context.new_page()
        page.goto(f"{address}/#/chat/new")
        page.get_by_role("button", name="Not now").click()
        expect(page.locator("#toasts")).to_contain_text("This server asks for a key: “Give a key” is at the top")
        expect(page.locator(".options select").first).to_have_value("")
        page.get_by_role("button", name="Give a key").click()
        page.get_by_label("Key", exact=True).fill("sesame")
        page.get_by_role("button", name="Use it").click()
        expect(page.locator(".options select").first).to_have_value("tiny")
        context.close()


def test_now_tells_how_many_drafted_tokens_were_accepted(chromium: Browser) -> None:
    engine, context = FakeEngine(), chromium.new_context()
    with running(create_app(engine, fake_model(), ServerConfig())) as address:
        page = context.new_page()
        page.clock.install()
        page.goto(address)
        expect(page.get_by_text("0 of 8 slots answer", exact=True)).to_be_visible()
        engine.drafts = DRAFTS
        page.clock.fast_forward(10_000)
        expect(page.get_by_text("0 of 8 slots answer, 62 % of 100 drafted tokens accepted")).to_be_visible()
        context.close()


def test_a_server_that_has_gone_leaves_what_was_last_known_and_says_so(chromium: Browser) -> None:
    app = create_app(FakeEngine(), fake_model(), ServerConfig())
    context = chromium.new_context()
    page = context.new_page()
    page.clock.install()
    with running(app) as address:
        page.goto(address)
        expect(page.get_by_text(re.compile("^up "))).to_be_visible()
        expect(page.locator("main.stale")).to_have_count(0)
    page.clock.fast_forward(60_000)
    expect(page.get_by_text("The server does not answer; what is shown is of ")).to_be_visible()
    expect(page.locator("main.stale")).to_have_count(1)
    with running(app, port=urlsplit(address).port or 0):
        page.clock.fast_forward(60_000)
        expect(page.get_by_text(re.compile("^up "))).to_be_visible()
        expect(page.locator("main.stale")).to_have_count(0)
        context.close()


def harmless(page: Page) -> None:
    """Asserts that no text has become anything else."""
    found = page.evaluate(
        """() => ({
            ran: window.__ran ?? null,
            elements: [...document.querySelectorAll("#main script, #main img, #main iframe, #main object, #main embed, #main base, #main link, #main meta, #main math:not(.math math), #main style, #main video, #main audio")].length,
            handlers: [...document.querySelectorAll("#main *:not(.math *), dialog *")].filter((one) => [...one.attributes].some(({ name }) => name.startsWith("on") || name === "style" || name === "srcdoc")).length,
            links: [...document.querySelectorAll("#main a[href], .math [href]")].map((one) => one.protocol ?? one.getAttribute("href")).filter((one) => !["http:", "https:"].includes(one)),
        })"""
    )
    assert found == {"ran": None, "elements": 0, "handlers": 0, "links": []}


def test_hostile_texts_stay_texts(chromium: Browser) -> None:
    answer = [""]
    engine = FakeEngine(lambda request: Script(texts=(answer[0],)))
    app = create_app(engine, fake_model(id="<img src=x onerror=__ran=1>"), ServerConfig())
    assert len(TEXTS) >= 200
    with running(app) as address:
        context = chromium.new_context()
        watched = Watched(context, address)
        page = context.new_page()
        with page.expect_response("**/v1/events"):
            page.goto(f"{address}/#/requests")
        num_taken = 0
        with httpx.Client(base_url=address, timeout=120) as client:
            for text in BARE:
                answer[0] = text
                body = {"messages": [{"role": "user", "content": text}], "session_id": text[:256]}
                num_taken += client.post("/v1/chat/completions", json=body).is_success
        assert num_taken > 50
        expect(page.locator(".waterfall tbody tr")).to_have_count(num_taken)
        harmless(page)
        for view, shown in (("sessions", "tbody tr"), ("now", ".lane"), ("models", ".models li")):
            page.goto(f"{address}/#/{view}")
            expect(page.locator(f".view.{view} {shown}").first).to_be_visible()
            harmless(page)
        open_chat(page, address)
        for text in TEXTS[:8]:
            answer[0] = text
            page.get_by_role("button", name="New chat").click()
            say(page, text)
            harmless(page)
        harmless(page)
        rendered = page.evaluate(
            """async (texts) => {
                const { markdown } = await import("/console/chat/render.js");
                const place = document.querySelector(".thread");
                return texts.map((text) => { place.replaceChildren(...markdown(text)); return place.textContent.length; });
            }""",
            [
                f"{before}{text}{after}"
                for text in TEXTS
                for before, after in (("", ""), ("- ", "\n"), ("| a |\n|---|\n| ", " |"))
            ],
        )
        assert len(rendered) == 3 * len(TEXTS)
        page.evaluate("""async (texts) => { const { markdown } = await import("/console/chat/render.js");
            document.querySelector(".thread").replaceChildren(...texts.flatMap((text) => markdown(text))); }""", TEXTS)  # fmt: skip
        harmless(page)
        context.close()
    assert watched.problems == []


MARKDOWN = {
    "a *b* **c** `d` ~~e~~": [["p", "a b c d e"]],
    "# Title\ntext": [["h3", "Title"], ["p", "text"]],
    "```py\nx = '*'\n```": [["figure", "pyCopyx = '*'"]],
    "```\nnever closed": [["figure", "textCopynever closed"]],
    "- a\n- b\n  - c\n\n1. d": [["ul", "abc"], ["ol", "d"]],
    "> a\n> b": [["blockquote", "a\nb"]],
    "| a | b |\n|---|:-:|\n| 1 | 2 |": [["div", "ab12"]],
    "[x](https://example.org/y)": [["p", "xexample.org"]],
    "[x](javascript:alert(1))": [["p", "[x](javascript:alert(1))"]],
    "![x](https://example.org/y.png)": [["p", "xexample.org"]],
    "<b>a</b> &amp; b": [["p", "<b>a</b> &amp; b"]],
    "snake_case_name and 2*3*4": [["p", "snake_case_name and 234"]],
    "a  \nb": [["p", "ab"]],
    "---": [["hr", ""]],
    "\\*a\\*": [["p", "*a*"]],
    "- [x] a\n- [ ] b": [["ul", "☑ a☐ b"]],
    "a<br>b<br/>c": [["p", "abc"]],
    "a[^1] b[^2]\n\n[^1]: note *one*": [["p", "a1 b[^2]"], ["section", "note one"]],
    "a \\(x_1*y*\\) b": [["p", "a x_1*y* b"]],
    "$$\nx\n$$": [["div", "\nx\n"]],
    "\\[ x \\]": [["div", " x "]],
    "costs $5 and $6": [["p", "costs $5 and $6"]],
    "$$ never closed": [["p", "$$ never closed"]],
}
ENDLESS = ["*" * 50_000, "[" * 50_000, "`" * 49_999 + "a", "> " * 50_000, "- " * 20_000, "**a " * 20_000, "_a " * 20_000,
           "|" * 50_000 + "\n|---|", "[a](" * 20_000, "  " * 20_000 + "- a", "\n".join("  " * n + "- a" for n in range(400)),
           "`a``b```c" * 8_000, "~~~" * 20_000, "1. " * 20_000, "*_*_" * 20_000, "https://a" * 20_000,
           "# a" + " " * 400_000 + "b", "a" + " " * 400_000 + "b", "|\n|-" + " " * 400_000 + "x", "- " * 9 + "a" + " " * 400_000 + "b",
           "$$" * 25_001, "$$\n" * 20_000, "\\(" * 25_000, "[^a]" * 20_000, "[^a]: b\n" * 5_000, "<br" * 20_000, "\\[\n" * 20_000]  # fmt: skip


def test_markdown_is_read_as_people_expect(page: Page, demo: str) -> None:
    page.goto(demo)
    shown = page.evaluate(
        """async (texts) => {
            const { markdown } = await import("/console/chat/render.js");
            return texts.map((text) => markdown(text).map((node) => [node.localName, node.textContent]));
        }""",
        list(MARKDOWN),
    )
    assert dict(zip(MARKDOWN, shown, strict=True)) == MARKDOWN


def test_no_text_keeps_the_page_busy(page: Page, demo: str) -> None:
    page.goto(demo)
    lengths = page.evaluate(
        """async (texts) => {
            const { markdown } = await import("/console/chat/render.js");
            return texts.map((text) => markdown(text).length);
        }""",
        ENDLESS,
    )
    assert len(lengths) == len(ENDLESS) and all(lengths)


@pytest.mark.usual("390-light")
@pytest.mark.parametrize(("width", "scheme"), itertools.product((390, 1024, 1440), ("light", "dark")))
def test_every_view_can_be_used_by_all(page: Page, demo: str, width: int, scheme: Literal["light", "dark"]) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme)
    page.goto(f"{demo}/#/requests")
    ask(demo, ADA, session_id="for all")
    page.get_by_role("button", name="for all").first.click()
    expect(page.locator("tr.details")).to_be_visible()
    assert problems_of(page) == ""
    page.goto(f"{demo}/#/tree")
    expect(page.get_by_role("heading", name="Whose it is")).to_be_visible()
    page.locator("canvas").press("ArrowDown")
    expect(page.locator(".users button").first).to_be_visible()
    assert problems_of(page) == ""
    page.goto(f"{demo}/#/sessions/for%20all")
    expect(page.get_by_role("heading", name="Turn 1")).to_be_visible()
    assert problems_of(page) == ""
    open_chat(page, demo)
    settings = page.get_by_text("System message and settings")
    selected = "(it) => (getSelection().selectAllChildren(it), getSelection().getRangeAt(0).getClientRects().length)"
    assert settings.evaluate(selected) == 1, "it is one line"
    settings.click()
    page.get_by_text("More ways to sample").click()
    say(page, "What is my name?")
    assert problems_of(page) == ""
    if width < 760:
        page.locator(".drawer summary").click()
    page.get_by_role("button", name="Rename").first.click()
    assert problems_of(page) == ""
    page.get_by_role("button", name="Cancel").click()
    for view in ("now", "sessions", "models"):
        page.goto(f"{demo}/#/{view}")
        expect(page.locator(f".view.{view}")).to_be_visible()
        expect(page.locator(f".view.{view} .empty")).to_have_count(0)
        assert problems_of(page) == "", view


def problems_of(page: Page) -> str:
    """Returns what axe-core says against the page as it is, and whether it is wider than its window."""
    # Colours fade for a moment where something has just been used.
    page.wait_for_function("() => document.getAnimations().every((one) => one.playState !== 'running')")
    found = Axe().run(page)
    wide = page.evaluate("document.documentElement.scrollWidth > innerWidth")
    return (found.generate_report() if found.violations_count else "") + ("wider than its window" if wide else "")


def test_the_colours_are_told_apart() -> None:
    css = (SOURCE / "app.css").read_text()
    blocks = re.findall(r"color-scheme: (?:light|dark);(.*?)}", css, re.DOTALL)
    palettes = [dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{3,6})", block)) for block in blocks]
    assert len(palettes) == 3 and palettes[1] == palettes[2]
    for colours in palettes:
        for ground in ("page", "panel", "code"):
            for ink in ("ink", "soft"):
                assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground, colours)
        for ground in ("page", "panel"):
            for ink in ("accent", "good", "bad", "live", "memory", "disk"):
                assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground, colours)
        for tier in ("live", "memory", "disk"):
            assert contrast(colours["on-tier"], colours[tier]) >= 4.5, (tier, colours)
        assert contrast(colours["on-accent"], colours["accent"]) >= 4.5


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2."""
    lights = sorted((luminance(one), luminance(other)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
