"""What a chat has: code, formulas, files, search, pins, presets, two models, keys, and five hundred messages."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, FilePayload, Page, Route, expect

from server.api.app import create_pool_app
from server.app.config import ServerConfig
from server.pool.pool import ModelPool
from tests.console.test_console import Watched, harmless, open_chat, problems_of, say
from tests.console.test_kept import HAVE_ENDED, wait_until_kept
from tests.support.apps import create_app
from tests.support.browser import BROWSER, expect_toast
from tests.support.fake_engine import FakeEngine, Script, fake_model
from tests.support.fake_opener import FakeOpener, catalog
from tests.support.live_server import running

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium was found; CHROMIUM may name one")

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
GIVE = """(element, [kind, name, type, content]) => {
    const data = new DataTransfer();
    data.items.add(new File([Uint8Array.from(atob(content), (one) => one.charCodeAt(0))], name, { type }));
    const event = kind === "paste" ? new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true })
        : new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true });
    element.dispatchEvent(event);
}"""


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(Script(texts=("Well.",)))


@pytest.fixture
def address(engine: FakeEngine) -> Iterator[str]:
    with running(create_app(engine, fake_model(context_tokens=4000), ServerConfig())) as base:
        yield base


@pytest.fixture
def page(address: str, context: BrowserContext) -> Iterator[Page]:
    watched = Watched(context, address)
    page = context.new_page()
    open_chat(page, address)
    yield page
    watched.end()
    assert watched.problems == []


def give(page: Page, kind: str, name: str, mime: str, content: bytes) -> None:
    field = page.get_by_label("Message", exact=True)
    field.evaluate(GIVE, [kind, name, mime, base64.b64encode(content).decode()])


def seeing(page: Page, *models: str) -> None:
    """Has the page know models that see images."""

    def listed(route: Route) -> None:
        (one,) = route.fetch().json()["data"]
        data = [
            {**one, "id": name or one["id"], "capabilities": ["completion", "vision"]} for name in models or ("",)
        ]
        route.fulfill(json={"object": "list", "data": data})

    page.route("**/v1/models", listed)
    page.reload()
    expect(page.get_by_label("Message", exact=True)).to_be_focused()


def test_code_has_colours_and_formulas_are_drawn(page: Page, engine: FakeEngine) -> None:
    text = "```python\ndef f(): return 'x' # note\n```\n\n\\(a^2\\) and\n\n$$\n\\frac{a}{b}\n$$\n\nשלום"
    engine.script = Script(texts=(text,))
    say(page, "Show me")
    answer = page.locator(".message.assistant")
    expect(answer.locator(".hljs-keyword").first).to_have_text("def")
    expect(answer.locator("math")).to_have_count(2)
    expect(answer.locator(".math mfrac")).to_be_visible()
    assert [one.evaluate("(p) => getComputedStyle(p).direction") for one in answer.locator("p").all()] == [
        "ltr",
        "rtl",
    ]
    harmless(page)
    assert problems_of(page) == ""


def test_formulas_do_nothing_but_show(page: Page) -> None:
    hostile = [
        r"\href{javascript:window.__ran=1}{x}", r"\url{javascript:window.__ran=1}", r"\class{a onclick=x}{b}",
        r"\style{position:fixed}{b}", r"\includegraphics{https://evil.example/x.png}", r"\def\a{\a\a}\a", r"\data{a=b}{c}",
        "<img src=x onerror=window.__ran=1>", r"\text{<script>window.__ran=1</script>}", "{" * 3000, r"\frac" * 1000,
    ]  # fmt: skip
    page.evaluate(
        """async (texts) => {
            const { markdown } = await import("/console/chat/render.js");
            const place = document.getElementById("main").appendChild(document.createElement("div"));
            window.__show = () => {
                place.replaceChildren(...texts.flatMap((text) => markdown(`\\\\(${text}\\\\)`)));
                return place.querySelector("math") !== null;
            };
        }""",
        ["x^2", *hostile],
    )
    page.wait_for_function("() => __show()")  # the first formula has the page load what draws them
    expect(page.locator("math").first).to_be_visible()
    harmless(page)


def test_a_text_and_an_image_go_with_a_question(page: Page, engine: FakeEngine) -> None:
    seeing(page)
    give(page, "paste", "shot.png", "image/png", PNG)
    give(page, "drop", "notes.txt", "text/plain", b"The door is violet.")
    expect(page.get_by_role("img", name="shot.png")).to_be_visible()
    expect(page.locator(".attached")).to_contain_text("notes.txt")
    give(page, "drop", "more.bin", "application/octet-stream", b"\0\1")
    expect_toast(page, "more.bin is neither a text nor an image")
    bottom, top = (
        page.locator(one).evaluate("(one, side) => one.getBoundingClientRect()[side]", side)
        for one, side in (("#toasts", "bottom"), (".composer", "top"))
    )
    assert bottom < top, "the notice hides the form"
    wait_until_kept(page, "(all) => all.some((one) => one.files?.length === 2)")
    page.reload()
    expect(page.locator(".attached li")).to_have_count(2)
    sent: list[Any] = []

    def without_files(route: Route) -> None:
        """The stand-in for a model sees nothing: what the page sends is what counts."""
        body = route.request.post_data_json
        sent.append(body)
        route.continue_(post_data=json.dumps({**(body or {}), "input": "What is this?"}))

    page.route("**/v1/responses", without_files)
    page.get_by_label("Message", exact=True).fill("What is this?")
    with page.expect_response("**/v1/responses"):
        page.get_by_role("button", name="Send", exact=True).click()
    expect(page.locator(".message.user .files li")).to_have_count(2)
    expect(page.locator(".attached li")).to_have_count(0)
    (question,) = sent[0]["input"]
    image, text, words = question["content"]
    assert image == {"type": "input_image", "image_url": f"data:image/png;base64,{base64.b64encode(PNG).decode()}"}
    assert "notes.txt" in text["text"] and "violet" in text["text"] and words["text"] == "What is this?"
    expect(page.locator(".message.assistant")).not_to_have_attribute("aria-busy", "true")


def test_a_model_that_sees_nothing_is_given_no_image(page: Page, engine: FakeEngine) -> None:
    page.add_init_script(
        """const ask = window.fetch, listed = new Promise((resolve) => (window.__list = resolve));
        window.fetch = async (...given) => {
            if (String(given[0]).includes("v1/models")) await listed;
            return ask(...given);
        };"""
    )
    page.reload()
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    give(page, "paste", "shot.png", "image/png", PNG)  # before the page knows what the model sees
    page.evaluate("() => window.__list()")
    expect_toast(page, "This model sees no images.")
    expect(page.locator(".attached li")).to_have_count(0)
    give(page, "drop", "a.txt", "text/plain", b"violet")
    page.get_by_role("button", name="Remove a.txt").click()
    expect(page.locator(".attached li")).to_have_count(0)
    assert not engine.requests


def test_files_given_while_others_are_read_are_all_kept(page: Page) -> None:
    seeing(page)
    page.evaluate(
        """() => {
            const asUrl = FileReader.prototype.readAsDataURL;
            FileReader.prototype.readAsDataURL = function (file) { window.__readImage = () => asUrl.call(this, file); };
        }"""
    )
    give(page, "paste", "shot.png", "image/png", PNG)
    page.wait_for_function("() => window.__readImage !== undefined")
    give(page, "drop", "notes.txt", "text/plain", b"The door is violet.")
    expect(page.locator(".attached")).to_contain_text("notes.txt")
    page.evaluate("() => window.__readImage()")
    expect(page.locator(".attached li")).to_have_count(2)


def test_a_file_that_cannot_be_taken_leaves_the_others(page: Page) -> None:
    given = [("a.txt", b"violet"), ("more.bin", b"\0\1"), ("b.txt", b"door")]
    files: list[FilePayload] = [{"name": name, "mimeType": "text/plain", "buffer": data} for name, data in given]
    page.get_by_label("Add files").set_input_files(files)
    expect(page.locator("#toasts")).to_contain_text("more.bin is neither a text nor an image")
    expect(page.locator(".attached summary")).to_contain_text(["a.txt", "b.txt"])


def test_the_last_words_stay_in_sight_while_a_message_grows(page: Page, engine: FakeEngine) -> None:
    engine.script = Script(texts=("Well.\n\n" * 60 + "That is all.",))
    say(page, "At length")
    last = page.locator(".message.assistant").get_by_text("That is all.")
    expect(last).to_be_in_viewport()
    page.get_by_label("Message", exact=True).fill("a line\n" * 12)
    expect(last).to_be_in_viewport()


def test_each_line_of_a_question_has_its_own_direction(page: Page) -> None:
    say(page, "שלום\ndef f():")
    left_of = """(p, text) => {
        const range = document.createRange();
        const at = p.firstChild.data.indexOf(text);
        range.setStart(p.firstChild, at);
        range.setEnd(p.firstChild, at + 1);
        return range.getBoundingClientRect().left;
    }"""
    question = page.locator(".message.user .plain")
    assert question.evaluate(left_of, "def") < question.evaluate(left_of, ":")
    assert question.evaluate(left_of, "ש") > question.evaluate(left_of, "ם")


def test_another_way_is_shown_from_where_it_begins(page: Page, engine: FakeEngine) -> None:
    engine.script = Script(texts=("Well.\n\n" * 60,))
    say(page, "At length")
    engine.script = Script(texts=("Well.",))
    page.locator(".message.user").get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("Briefly")
    page.get_by_role("button", name="Send as another way").click()
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    expect(page.locator(".message.assistant .text")).to_have_text("Well.")
    page.get_by_role("button", name="Earlier way").click()
    expect(page.locator(".message.user")).to_contain_text("At length")
    expect(page.get_by_role("button", name="Later way")).to_be_in_viewport()


def test_a_chat_is_deleted_only_by_who_means_it(page: Page) -> None:
    say(page, "Where is the violet door?")
    delete = page.get_by_role("button", name="Delete Where is the violet door?")
    for answer, left in (("Cancel", 1), ("Delete", 0)):
        delete.click()
        page.get_by_role("dialog").get_by_role("button", name=answer).click()
        expect(page.get_by_role("dialog")).to_have_count(0)
        expect(page.locator(".chats li")).to_have_count(left)


def test_all_chats_are_searched_and_some_are_pinned(page: Page) -> None:
    for question in ("Where is the violet door?", "Who paints it?"):
        page.get_by_role("button", name="New chat").click()
        say(page, question)
    items = page.locator(".chats li")
    expect(items.first).to_contain_text("Who paints it?")
    page.get_by_role("button", name="Pin Where is the violet door?").click()
    expect(items.first).to_contain_text("Where is the violet door?")
    wait_until_kept(page, "(all) => all.some((one) => one.isPinned)")
    page.reload()
    expect(items.first).to_contain_text("Where is the violet door?")
    page.keyboard.press("Control+k")
    search = page.get_by_label("Search all chats")
    expect(search).to_be_focused()
    wait_until_kept(page, HAVE_ENDED, 4)
    search.fill("PAINTS")
    expect(page.get_by_text("Found in 1 chat.")).to_be_visible()
    expect(items).to_have_count(1)
    search.fill("well.")
    expect(page.get_by_text("Found in 2 chats.")).to_be_visible()


def test_presets_keep_what_a_chat_is_told(page: Page) -> None:
    page.get_by_text("System message and settings").click()
    page.get_by_label("System message", exact=True).fill("Be terse.")
    page.get_by_label("Keep these as").fill("terse")
    page.get_by_role("button", name="Keep", exact=True).click()
    expect_toast(page, "terse is kept")
    page.reload()
    page.get_by_text("System message and settings").click()
    page.get_by_label("System message", exact=True).fill("")
    page.get_by_role("combobox", name="Preset").focus()
    page.get_by_role("combobox", name="Preset").select_option("terse")
    expect(page.get_by_label("System message", exact=True)).to_have_value("Be terse.")
    page.get_by_role("button", name="Forget the preset terse").click()
    expect(page.get_by_role("button", name="Forget the preset terse")).to_have_count(0)


def test_every_setting_is_sent_and_kept(page: Page, engine: FakeEngine) -> None:
    page.get_by_text("System message and settings").click()
    page.get_by_text("More ways to sample").click()
    for label, value in {"Temperature": "0.7", "Top k": "20", "Min p": "0.05", "Repetition penalty": "1.1"}.items():
        page.get_by_label(label).fill(value)
    page.get_by_label("Texts that end the answer").fill("The end\nFinis")
    fields = page.get_by_label("Other fields of the API")
    fields.fill("[1]")
    say(page, "Hello")
    expect_toast(page, "“Other fields of the API, as JSON” is not used: It has another form.")
    fields.fill('{"logit_bias": {"5": -3}}')
    say(page, "Again")
    sampling, stop = engine.requests[-1].sampling, engine.requests[-1].stop
    assert (sampling.temperature, sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (0.7, 20, 0.05, 1.1)
    assert sampling.logit_bias == ((5, -3.0),) and stop == ("The end", "Finis")
    page.reload()
    page.get_by_text("System message and settings").click()
    page.get_by_text("More ways to sample").click()
    expect(page.get_by_label("Top k")).to_have_value("20")
    expect(page.get_by_label("Texts that end the answer")).to_have_value("The end\nFinis")


def test_an_exported_chat_comes_back_with_its_settings_and_models(page: Page, tmp_path: Path) -> None:
    page.get_by_text("System message and settings").click()
    page.get_by_text("More ways to sample").click()
    temperature, fields = page.get_by_label("Temperature"), page.get_by_label("Other fields of the API")
    temperature.fill("0.7")
    fields.fill('{"logit_bias": {"5": -3}}')
    say(page, "Hello")
    model = page.locator(".message.assistant .by").inner_text()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    whole = json.loads(Path(download.value.path()).read_text())
    kept: dict[str, Any] = {"temperature": 0.7, "fields": '{"logit_bias": {"5": -3}}'}
    assert whole["settings"] == kept
    spoiled = {"temperature": "hot", "fields": "[1]", "tools": "[", "stop": 3, "effort": {}}
    for title, settings, shown in (("whole", kept, ("0.7", kept["fields"])), ("spoiled", spoiled, ("", ""))):
        file = tmp_path / f"{title}.json"
        file.write_text(json.dumps({**whole, "title": title, "settings": settings}))
        page.locator(".chats input[type=file]").set_input_files(file)
        expect(page.locator(".chats li.current")).to_contain_text(title)
        expect(page.locator(".message.assistant .by")).to_have_text(model)
        expect(temperature).to_have_value(shown[0])
        expect(fields).to_have_value(shown[1])


def test_a_question_waits_for_its_model_and_says_so(context: BrowserContext) -> None:
    opener = FakeOpener()
    opener.may_finish.clear()
    with running(create_pool_app(ModelPool(catalog("a", "b"), opener=opener), ServerConfig())) as base:
        page = context.new_page()
        page.goto(f"{base}/#/chat/new/b")
        field = page.get_by_label("Message", exact=True)
        expect(field).to_be_focused()
        field.fill("Hello")
        field.press("Enter")
        answer = page.locator(".message.assistant")
        expect(answer).to_contain_text("Waits for b to load: reading weights.")
        opener.may_finish.set()
        expect(answer).not_to_contain_text("Waits for b")
        expect(answer).not_to_have_attribute("aria-busy", "true")
        page.close()


def test_two_models_answer_side_by_side(page: Page) -> None:
    (own,) = page.evaluate("fetch('/v1/models').then((one) => one.json())")["data"]
    seeing(page, own["id"], "another")
    page.route(
        "**/v1/responses",
        lambda route: route.continue_(post_data=route.request.post_data.replace('"another"', json.dumps(own["id"]))),
    )
    page.get_by_label("Compare with").select_option("another")
    page.get_by_label("Message", exact=True).fill("Hello")
    page.get_by_label("Message", exact=True).press("Enter")
    both = page.locator(".pair .message.assistant")
    expect(both).to_have_count(2)
    expect(both.nth(0)).to_contain_text("another")
    for one in (both.nth(0), both.nth(1)):
        expect(one.locator(".text")).to_contain_text("Well.")
    assert problems_of(page) == ""
    page.locator(".options select").first.select_option("another")
    expect(page.get_by_label("Compare with")).to_have_value("")


def test_keys_are_listed_and_work(page: Page) -> None:
    say(page, "One")
    page.get_by_role("button", name="Keys").click()
    expect(page.get_by_role("dialog")).to_contain_text("search in all chats")
    page.get_by_role("button", name="Close").click()
    page.keyboard.press("Alt+KeyN")
    expect(page.locator(".message")).to_have_count(0)
    say(page, "Two")
    page.keyboard.press("Alt+ArrowDown")
    expect(page.locator(".message.user")).to_contain_text("One")


def test_only_what_is_seen_of_five_hundred_messages_is_in_the_page(page: Page) -> None:
    nodes, parent = {}, "root"
    for at in range(500):
        role, text = (
            ("user", f"question {at}") if at % 2 == 0 else ("assistant", f"answer {at}\n\n- one\n- two\n\n" * 3)
        )
        nodes[f"n{at}"] = {"id": f"n{at}", "parent": parent, "role": role, "content": text, "created": at}
        parent = f"n{at}"
    chat = {"format": "mlx-serve-chat", "title": "long", "nodes": nodes, "chosen": {}}
    page.locator(".chats input[type=file]").set_input_files(
        {"name": "long.json", "mimeType": "application/json", "buffer": json.dumps(chat).encode()}
    )
    expect(page.get_by_text("answer 499").first).to_be_visible()
    thread = page.get_by_label("Messages")
    assert page.locator(".message").count() < 40 and page.locator("*").count() < 1500
    kept = page.locator(".message").last.element_handle()
    for place in ("0", "scrollHeight / 2", "scrollHeight"):
        thread.evaluate(f"(one) => {{ one.scrollTop = {place.replace('scroll', 'one.scroll')}; }}")
        if place == "0":
            expect(page.get_by_text("question 0", exact=True)).to_be_visible()
        assert page.locator(".message").count() < 60
    expect(page.get_by_text("answer 499").first).to_be_visible()
    page.goto(page.url.split("#")[0] + "#/models")
    page.go_back()
    expect(page.get_by_text("answer 499").first).to_be_visible()
    last = page.locator(".message").last.element_handle()
    page.goto(page.url.split("#")[0] + "#/now")
    page.go_back()
    expect(page.get_by_text("answer 499").first).to_be_visible()
    assert page.evaluate("([one, other]) => one === other", [last, page.locator(".message").last.element_handle()])
    assert kept is not None


def test_on_a_phone_chats_are_a_drawer_above(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.reload()
    drawer = page.locator(".drawer")
    expect(drawer.locator("summary")).to_be_visible()
    expect(page.get_by_role("button", name="New chat")).to_be_hidden()
    drawer.locator("summary").click()
    expect(page.get_by_role("button", name="New chat")).to_be_visible()
    boxes = [one.bounding_box() for one in (drawer, page.get_by_label("Message", exact=True))]
    assert boxes[0] and boxes[1] and boxes[0]["y"] < boxes[1]["y"] < 844
    assert problems_of(page) == ""
