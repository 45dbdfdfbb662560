"""Images in conversations: opened in one place, for models that see; never a reason to refuse a history."""

import base64
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from cache.snapshots import RestorePointKind
from models.errors import InvalidImage
from models.prompt.pictures import Picture
from models.vision.image_files import read_header
from server.api.conversation import cut_at_last_point, next_turn_request
from server.api.images import MAX_NEW_IMAGES, UNREADABLE, image_part, with_pictures
from server.app.config import ServerConfig
from server.engine.request import GenerationRequest
from server.pool.served import ListedModel
from tests.models.prompt.test_pictures import renderer_of
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, Script, fake_model
from tests.support.fake_vision import picture_of
from tests.support.tiny_vision import image

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
A, B = image(1), image(2)
ASKED = {"role": "user", "content": "Go on."}
SEEN = {"role": "assistant", "content": "I see."}
DAMAGED = A[:-20]


def opened(data: bytes) -> Picture:
    """What a model's vision opens."""
    read_header(data)
    return picture_of(data)


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def chat_image(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(data)}", "detail": "auto"}}


def block(data: bytes) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(data)}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


class Asked:
    """A client of a server whose model sees, and what the engine gets."""

    def __init__(self, *, sees: bool = True) -> None:
        self.engine = FakeEngine()
        vision: Any = SimpleNamespace(open=opened) if sees else None
        renderer: Any = renderer_of()
        model = fake_model(renderer=renderer, context_tokens=2000, vision=vision)
        self.app = create_app(self.engine, model, ServerConfig())
        self.client = TestClient(self.app)

    def post(self, path: str, *messages: Any, **fields: Any) -> Any:
        return self.client.post(path, json={"messages": [*messages], "max_tokens": 4, **fields})

    def request(self, path: str, *messages: Any, **fields: Any) -> GenerationRequest:
        answer = self.post(path, *messages, **fields)
        assert answer.status_code == 200, answer.text
        return self.engine.requests[-1]


def shown(request: GenerationRequest) -> list[bytes]:
    return [one.picture.data for one in request.pictures.placed]


@pytest.mark.parametrize(
    ("path", "part"),
    [
        (CHAT, chat_image(A)),
        (CHAT, {"type": "image_url", "image_url": chat_image(A)["image_url"]["url"]}),
        (CHAT, {"type": "input_image", "image_url": chat_image(A)["image_url"]["url"]}),
        (CHAT, {"type": "image", "data": encoded(A), "mimeType": "image/png"}),
        (MESSAGES, block(A)),
    ],
)
def test_an_image_is_seen(path: str, part: dict[str, Any]) -> None:
    asked = Asked()
    request = asked.request(path, user(text("What is"), part, text("this?")))
    assert shown(request) == [A]
    following = asked.request(path, user(text("What is"), part), SEEN, ASKED)
    stop = request.pictures.placed[0].stop
    assert following.tokens[:stop].tolist() == request.tokens[:stop].tolist()


def test_images_in_results_of_tools_are_seen() -> None:
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Read", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("Here:"), block(A)]}
    assert shown(Asked().request(MESSAGES, ASKED, use, user(result))) == [A]
    only = {"type": "tool_result", "tool_use_id": "t", "content": [block(B)], "is_error": True}
    assert shown(Asked().request(MESSAGES, ASKED, use, user(only), SEEN, ASKED)) == [B]
    call = {"id": "c", "type": "function", "function": {"name": "Read", "arguments": "{}"}}
    said = {"role": "tool", "tool_call_id": "c", "content": [chat_image(A)]}
    assert shown(Asked().request(CHAT, ASKED, {"role": "assistant", "tool_calls": [call]}, said)) == [A]


BAD = {
    "no image": encoded(b"no image"),
    "cut": encoded(DAMAGED),
    "a PDF": encoded(b"%PDF-1.7"),
    "no base64": "@@@",
    "nothing": "",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_refused_when_new_and_a_line_later(name: str) -> None:
    bad = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BAD[name]}}
    asked = Asked()
    answer = asked.post(MESSAGES, user(text("See:"), bad))
    assert answer.status_code == 400
    error = answer.json()["error"]["message"]
    assert error.startswith("messages.0.content.1.image: ") and "image_block" in error
    later = asked.client.post(f"{MESSAGES}/count_tokens", json={"messages": [user(bad), SEEN, ASKED]})
    assert later.status_code == 200
    request = asked.request(MESSAGES, user(text("See:"), bad, block(A)), SEEN, ASKED)
    assert shown(request) == [A]


def test_a_model_that_sees_is_not_told_that_it_reads_no_images() -> None:
    vision: Any = SimpleNamespace(open=opened)
    history = [user(image_part({"image": encoded(DAMAGED)}), image_part({"image": encoded(A)}))]
    (message,) = with_pictures(history, vision)
    assert [part.get("picture") is not None for part in message["content"]] == [False, True]
    assert message["content"][0]["text"] == UNREADABLE
    (said,) = with_pictures([{"role": "system", "content": [image_part({"image": encoded(A)})]}], vision)
    assert said["content"][0]["text"] == UNREADABLE and "picture" not in said["content"][0]


@pytest.mark.parametrize(
    "url", ["https://example.org/a.png", "http://x/y", "data:image/png,abc", "file:///etc/passwd"]
)
def test_nothing_is_fetched(url: str) -> None:
    answer = Asked().post(CHAT, user(text("See:"), {"type": "image_url", "image_url": {"url": url}}))
    assert answer.status_code == 400 and "image_block" in answer.json()["error"]["message"]


def test_a_message_holds_twenty_images_and_a_history_more() -> None:
    asked, many = Asked(), [chat_image(image(number, 8, 8)) for number in range(MAX_NEW_IMAGES + 1)]
    assert asked.post(CHAT, user(*many)).status_code == 400
    request = asked.request(CHAT, user(*many[1:]), SEEN, user(*many[:5]), SEEN, ASKED)
    assert len(request.pictures.placed) == 25


def test_ids_of_pictures_are_shown_as_words() -> None:
    answer = Asked().post(CHAT, user(chat_image(A)), return_token_ids=True).json()
    assert min(answer["prompt_token_ids"]) >= 0
    counted = Asked().client.post(f"{MESSAGES}/count_tokens", json={"messages": [user(block(A))]}).json()
    assert counted["input_tokens"] == len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    tokens = Asked().client.post("/tokenize", json={"messages": [user(chat_image(A))]}).json()["tokens"]
    assert tokens == answer["prompt_token_ids"]


def test_a_picture_that_no_decoder_reads_fails_with_a_sentence() -> None:
    asked = Asked()
    asked.engine.script = Script(error=InvalidImage("an image cannot be decoded: broken"))
    answer = asked.post(CHAT, user(chat_image(A)))
    assert answer.status_code == 400 and "cannot be decoded" in answer.json()["error"]["message"]


def test_sessions_and_cache_listings_show_a_label() -> None:
    asked = Asked()
    asked.request(CHAT, user(text("What is"), chat_image(A)), session_id="s")
    asked.request(CHAT, user(text("What is"), chat_image(B)), SEEN, ASKED, session_id="s")
    for path in ("/v1/sessions", "/v1/sessions/s", "/v1/stats", "/slots"):
        told = asked.client.get(path).text
        assert encoded(A)[:20] not in told and "\\ufffc" not in told


def items(*given: Any) -> dict[str, Any]:
    return {"input": [*given], "max_output_tokens": 4}


def item_image(data: bytes) -> dict[str, Any]:
    return {"type": "input_image", "image_url": f"data:image/png;base64,{encoded(data)}", "detail": "auto"}


def test_the_responses_api_shows_images_of_messages_and_of_calls() -> None:
    asked = Asked()
    words = {"type": "input_text", "text": "What is"}
    for given in (
        items(user(words, item_image(A), words)),
        items(*outputs(item_image(A))),
        items(*outputs(words, item_image(A)), ASKED),
    ):
        answer = asked.client.post("/v1/responses", json=given)
        assert answer.status_code == 200, answer.text
        assert shown(asked.engine.requests[-1]) == [A]
    assert asked.client.post("/v1/responses", json=items(user(item_image(DAMAGED)))).status_code == 400
    assert asked.client.post("/v1/responses", json=items(user(item_image(DAMAGED)), SEEN, ASKED)).status_code == 200
    many = [item_image(image(number, 8, 8)) for number in range(MAX_NEW_IMAGES + 1)]
    assert asked.client.post("/v1/responses", json=items(user(*many))).status_code == 400


def outputs(*parts: Any) -> list[dict[str, Any]]:
    called = {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"}
    return [ASKED, called, {"type": "function_call_output", "call_id": "c", "output": [*parts]}]


def test_a_stored_response_keeps_its_images() -> None:
    asked = Asked()
    first = asked.client.post("/v1/responses", json=items(user(item_image(A)))).json()
    following = asked.client.post("/v1/responses", json={**items(ASKED), "previous_response_id": first["id"]})
    assert following.status_code == 200 and shown(asked.engine.requests[-1]) == [A]
    kept = asked.client.get(f"/v1/responses/{first['id']}/input_items").json()["data"]
    assert kept[0]["content"][0] == item_image(A)


def test_ollamas_messages_show_images() -> None:
    asked = Asked()
    body = {"model": "tiny", "stream": False, "messages": [{**ASKED, "images": [encoded(A), encoded(B)]}]}
    assert asked.client.post("/api/chat", json=body).status_code == 200
    assert shown(asked.engine.requests[-1]) == [A, B]
    bad = {**ASKED, "images": [encoded(DAMAGED)]}
    no_list = {**ASKED, "images": encoded(A)}
    for messages, status in (
        ([bad], 400),
        ([bad, SEEN, ASKED], 200),
        ([no_list], 400),
        ([no_list, SEEN, ASKED], 400),
    ):
        assert asked.client.post("/api/chat", json={**body, "messages": messages}).status_code == status


@pytest.mark.parametrize("sees", [True, False])
def test_listings_say_who_sees(sees: bool) -> None:
    client = Asked(sees=sees).client
    assert client.get("/props").json()["modalities"]["vision"] is sees
    assert ("vision" in client.post("/api/show", json={"model": "tiny"}).json()["capabilities"]) is sees
    assert client.get("/api/v1/models").json()["models"][0]["capabilities"]["vision"] is sees
    assert ("vision" in client.get("/v1/models").json()["data"][0]["capabilities"]) is sees
    assert ("vision" in ListedModel("unloaded", has_tower=sees).capabilities) is sees


def test_idle_work_evaluates_pictures_too() -> None:
    request = Asked().request(CHAT, user(text("What is"), chat_image(A)))
    prompt = renderer_of().render(
        [{"role": "user", "content": [{"text": "", "picture": opened(A)}, {"text": "a" * 40}]}]
    )
    ahead = next_turn_request(request, [1, 2], prompt)
    assert ahead is not None and ahead.pictures is prompt.pictures
    cut = cut_at_last_point(prompt, (RestorePointKind.USER_START,))
    assert not cut.pictures.placed and cut_at_last_point(prompt, (RestorePointKind.PROMPT_END,)).pictures.placed


def test_a_state_shows_images_where_it_names_them() -> None:
    asked = Asked()
    question = {"type": "noul", "instructions": "Is it red?"}
    state = {"first": "pic-1", "same": "see pic-1.", "other": "pic-2"}
    assets = {"pic-1": {"type": "image", "data_base64": encoded(A)}, "pic-2": {"data_base64": encoded(B)}}
    body = {"state": state, "assets": assets, "questions": {"q": question, "r": question}}
    answer = asked.client.post("/v1/systemone", json=body)
    assert answer.status_code == 200, answer.text
    (request,) = asked.engine.requests
    assert shown(request) == [A, A, B]
    assert all(one.tokens[: len(request.tokens)].tolist() == request.tokens.tolist() for one in request.questions)
    part = {"type": "input_image", "image_url": f"data:image/png;base64,{encoded(A)}"}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Look:"}, part]}]
    questions = [{"type": "predicate", "instructions": "Is it red?"}]
    assert asked.client.post("/v1/decisions", json={"input": items, "questions": questions}).status_code == 200
    assert shown(asked.engine.requests[-1]) == [A]
    damaged = {"pic-1": {"data_base64": encoded(DAMAGED)}, "pic-2": {"data_base64": encoded(B)}}
    assert asked.client.post("/v1/systemone", json={**body, "assets": damaged}).status_code == 422
