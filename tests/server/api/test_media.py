"""Pictures, documents and sounds: a line in the history, refused only in what the person says last."""

from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.api.images import UNREAD
from server.app.config import ServerConfig
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, FakeRenderer, fake_model

URL = {"url": "data:image/png;base64,AAAA"}
PNG = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
TEXT = {"type": "text", "media_type": "text/plain", "data": "Tea is served."}
IMAGE = UNREAD.format("image")
FILE = UNREAD.format("document")
SOUND = UNREAD.format("sound")


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


def text(words: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": words}


def result(*content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": [*content]}


ASKED = {"role": "user", "content": "Read it."}
SEEN = {"role": "assistant", "content": "I see."}
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {}}]}
CALL = {"id": "c", "type": "function", "function": {"name": "Read", "arguments": "{}"}}
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
CHAT_PARTS = {
    IMAGE: {"type": "image_url", "image_url": URL},
    FILE: {"type": "file", "file": {"file_data": "AAAA"}},
    SOUND: {"type": "input_audio", "input_audio": {"data": "AAAA"}},
}
BLOCKS = {IMAGE: {"type": "image", "source": PNG}, FILE: {"type": "document", "source": PNG}}
ITEM_PARTS = {IMAGE: {"type": "input_image", "image_url": "x"}, FILE: {"type": "input_file", "file_data": "x"}}


def chat_body(*messages: Any) -> dict[str, Any]:
    return {"messages": [*messages], "max_tokens": 4, "stream": False}


def items(*given: Any) -> dict[str, Any]:
    return {"input": [*given], "max_output_tokens": 4}


def item_result(*parts: Any) -> list[dict[str, Any]]:
    called = {"type": "function_call", "call_id": "c", "name": "Read", "arguments": "{}"}
    return [ASKED, called, {"type": "function_call_output", "call_id": "c", "output": [*parts]}]


HISTORIES: list[tuple[str, Callable[[Any], dict[str, Any]], dict[str, Any]]] = [
    (CHAT, lambda part: chat_body(user(text("Look:"), part), SEEN, ASKED), CHAT_PARTS),
    (CHAT, lambda part: chat_body(ASKED, {**SEEN, "content": [part]}, ASKED), CHAT_PARTS),
    (CHAT, lambda part: chat_body(ASKED, {"role": "system", "content": [part]}, ASKED), CHAT_PARTS),
    ("/v1/responses", lambda part: items({"role": "developer", "content": [part]}, ASKED), ITEM_PARTS),
    (
        "/api/chat",
        lambda part: {**chat_body({"role": "system", "content": "", "images": part}, ASKED), "model": "tiny"},
        {IMAGE: ["AAAA"]},
    ),
    (CHAT, lambda part: chat_body(ASKED, {"role": "assistant", "tool_calls": [CALL]}, tool(part)), CHAT_PARTS),
    (MESSAGES, lambda part: chat_body(user(part), SEEN, ASKED), BLOCKS),
    (MESSAGES, lambda part: chat_body(ASKED, USE, user(result(part))), BLOCKS),
    (MESSAGES, lambda part: chat_body(ASKED, USE, user(result(text("Here:"), part)), SEEN, ASKED), BLOCKS),
    (MESSAGES, lambda part: chat_body(ASKED, USE, user(result(), part)), BLOCKS),
    (f"{MESSAGES}/count_tokens", lambda part: {"messages": [user(part)]}, BLOCKS),
    ("/v1/responses", lambda part: items(user(part), SEEN, ASKED), ITEM_PARTS),
    ("/v1/responses/input_tokens", lambda part: {"input": [user(part)]}, ITEM_PARTS),
    ("/v1/responses", lambda part: items(*item_result(part)), ITEM_PARTS),
    ("/v1/responses", lambda part: items(*item_result(text("x", "input_text"), part), ASKED), ITEM_PARTS),
    (
        "/api/chat",
        lambda part: {**chat_body({**ASKED, "images": part}, SEEN, ASKED), "model": "tiny"},
        {IMAGE: ["AAAA"]},
    ),
]


def tool(*parts: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c", "content": [text("It is here."), *parts]}


def prompt_of(path: str, body: dict[str, Any]) -> str:
    """All text of the prompt that a request made."""
    renderer = FakeRenderer()
    client = TestClient(create_app(FakeEngine(), fake_model(renderer=renderer, context_tokens=2000), ServerConfig()))
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return "\n".join(part["text"] for message in renderer.calls[0]["messages"] for part in message["content"])


@pytest.mark.parametrize(
    ("path", "body", "shown"),
    [(path, body(part), shown) for path, body, parts in HISTORIES for shown, part in parts.items()],
)
def test_what_lies_in_the_history_is_one_line(path: str, body: dict[str, Any], shown: str) -> None:
    prompt = prompt_of(path, body)
    assert prompt.count(shown) == 1 and "AAAA" not in prompt


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (TEXT, "Tea is served."),
        ({"type": "content", "content": "Tea is served."}, "Tea is served."),
        ({"type": "content", "content": [text("Tea"), {"type": "image", "source": PNG}]}, f"Tea\n{IMAGE}"),
    ],
)
def test_a_document_that_is_text_is_read(source: dict[str, Any], shown: str) -> None:
    document = {"type": "document", "source": source, "title": "menu.txt"}
    for messages in ([user(document)], [ASKED, USE, user(result(document))]):
        assert f"menu.txt\n{shown}" in prompt_of(MESSAGES, chat_body(*messages))


NEWEST = [
    (
        CHAT,
        chat_body(ASKED, SEEN, user(text("See:"), CHAT_PARTS[IMAGE])),
        "messages.2.content.1.image",
        "image_block",
    ),
    (CHAT, chat_body(user(CHAT_PARTS[FILE])), "messages.0.content.0.document", "no model here takes a document"),
    (MESSAGES, chat_body(user(BLOCKS[IMAGE])), "messages.0.content.0.image", "image_block"),
    (MESSAGES, chat_body(ASKED, SEEN, user(BLOCKS[FILE])), "messages.2.content.0.document", "document_block"),
    (MESSAGES, chat_body(user(BLOCKS[IMAGE]), ASKED), "messages.0.content.0.image", "image_block"),
    ("/v1/responses", items(ASKED, user(ITEM_PARTS[FILE])), "input.1.content.0.document", "document_block"),
    (
        "/api/chat",
        {**chat_body({**ASKED, "images": ["AAAA"]}), "model": "tiny"},
        "messages.0.images.0: ",
        "this model takes no images, only text",
    ),
]


@pytest.mark.parametrize(("path", "body", "place", "words"), NEWEST)
def test_what_the_person_sends_last_is_refused_by_its_place(
    path: str, body: dict[str, Any], place: str, words: str
) -> None:
    client = TestClient(create_app(FakeEngine(), fake_model(context_tokens=2000), ServerConfig()))
    answer = client.post(path, json=body)
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert answer.status_code == 400 and message.startswith(place) and words in message
    assert "; send the message without it" in message


def test_a_custom_tool_of_a_chat_is_refused_with_where_it_is_taken() -> None:
    client = TestClient(create_app(FakeEngine(), fake_model(), ServerConfig()))
    body = {**chat_body(ASKED), "tools": [{"type": "custom", "custom": {"name": "patch"}}]}
    error = client.post(CHAT, json=body).json()["error"]
    assert error["param"] == "tools[0].type" and "/v1/responses" in error["message"]
