"""llama.cpp's endpoints: tokens, templates, slots and properties, in its shapes."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from models.inference.sampling_params import SamplingParams
from server.app.config import ServerConfig
from server.pool.served import ModelFacts
from tests.server.api.test_live import Live, raw_request, serving, until, user
from tests.support import tiny_models
from tests.support.apps import create_app
from tests.support.fake_engine import DRAFTS, FakeEngine, FakeRenderer, Script, fake_model

HI = [{"role": "user", "content": "Hi"}]


class SlotEngine(FakeEngine):
    """Has two slots, of which some are at work."""

    busy: frozenset[int] = frozenset()

    async def execute(self, command: Callable[..., Any], *given: Any) -> Any:
        await super().execute(command, *given)
        return [index in self.busy for index in range(2)]


@pytest.fixture
def engine() -> SlotEngine:
    return SlotEngine()


@pytest.fixture
def client(engine: SlotEngine) -> TestClient:
    facts = ModelFacts(chat_template="{{ messages }}", bos_token="<s>", eos_token="</s>")
    model = fake_model(facts=facts, sampling=SamplingParams(temperature=0.7, top_k=20))
    return TestClient(create_app(engine, model, ServerConfig(slots=2)))


# ------------------------------------------------------------------------------------------------------------ tokens


def test_text_becomes_tokens_and_tokens_text(client: TestClient) -> None:
    assert client.post("/tokenize", json={"content": "Hi"}).json() == {"tokens": [72, 105]}
    assert client.post("/detokenize", json={"tokens": [72, 105]}).json() == {"content": "Hi", "prompt": "Hi"}
    assert client.post("/tokenize", json={}).json() == {"tokens": []}
    assert client.post("/detokenize", json={}).json() == {"content": "", "prompt": ""}


def test_text_and_conversations_become_tokens_in_vllms_words(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    told = {"count": 2, "max_model_len": 200}
    assert client.post("/tokenize", json={"model": "tiny", "prompt": "Hi"}).json() == {"tokens": [72, 105], **told}
    shown = client.post("/apply-template", json={"messages": HI}).json()["prompt"]
    answer = client.post("/tokenize", json={"messages": HI, "add_special_tokens": False}).json()
    assert answer == {"tokens": [ord(one) for one in shown], "count": len(shown), "max_model_len": 200}
    assert client.post("/tokenize", json={"messages": HI, "add_special_tokens": True}).status_code == 400
    caplog.set_level("DEBUG", "server.api.bodies")
    assert client.post("/tokenize", json={"messages": HI, "with_pieces": True, "seen": 1}).json()["tokens"][0][
        "piece"
    ]
    assert caplog.messages == ["fields without effect: seen"]


@pytest.mark.parametrize(
    ("fields", "is_special"),
    [
        ({"prompt": "Hi"}, True),
        ({"prompt": "Hi", "add_special_tokens": False}, False),
        ({"content": "Hi"}, False),
        ({"content": "Hi", "add_special": True}, True),
    ],
)
def test_a_prompt_has_special_tokens_around_it_as_in_vllm(fields: Any, is_special: bool) -> None:
    class Renderer(FakeRenderer):
        def tokenize(self, text: str, *, add_special: bool = False, **options: Any) -> list[int]:
            return [int(add_special)]

    client = TestClient(create_app(FakeEngine(), fake_model(renderer=Renderer()), ServerConfig()))
    assert client.post("/tokenize", json=fields).json()["tokens"] == [int(is_special)]


def test_pieces_are_text_or_bytes(client: TestClient) -> None:
    answer = client.post("/tokenize", json={"content": "Há", "with_pieces": True, "unheard_of": 1})
    assert answer.json() == {"tokens": [{"id": 72, "piece": "H"}, {"id": 0xE1, "piece": [0xE1]}]}


@pytest.mark.parametrize(
    ("path", "fields", "word"),
    [
        ("/tokenize", {"content": 3}, "content: Input should be a valid string"),
        ("/detokenize", {"tokens": "Hi"}, "tokens: Input should be a valid list"),
        ("/detokenize", {"tokens": [1, 1024]}, "tokens[1]: 1024 is no token id from 0 to 1023"),
        ("/detokenize", {"tokens": [10**30]}, "tokens[0]"),
        (
            "/apply-template",
            {"messages": HI, "continue_final_message": True},
            "continue_final_message: the last message is not the assistant's",
        ),
        ("/apply-template", {"messages": [{"role": "assistant", "content": "x"}]}, "chat template refuses"),
        ("/v1/chat/completions/input_tokens", {"messages": []}, "messages:"),
    ],
)
def test_what_is_wrong_is_said_as_llama_cpp_says_it(client: TestClient, path: str, fields: Any, word: str) -> None:
    answer = client.post(path, json=fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["type"], set(error)) == (400, "invalid_request_error", {"code", "type", "message"})
    assert word in error["message"]


# ---------------------------------------------------------------------------------------------------------- template


def test_a_conversation_is_shown_as_the_prompt_that_it_becomes(client: TestClient, engine: FakeEngine) -> None:
    body = {"messages": [{"role": "system", "content": "Be terse."}, *HI]}
    assert client.post("/apply-template", json=body).json() == {"prompt": "<system>Be terse.<user>Hi"}
    counted = client.post("/v1/chat/completions/input_tokens", json=body).json()
    assert counted == client.post("/chat/completions/input_tokens", json=body).json()
    assert counted == {"input_tokens": len("<system>Be terse.<user>Hi")}
    assert engine.requests == []


# -------------------------------------------------------------------------------------------------------- completion


def events(answer: Any) -> list[Any]:
    assert answer.text.endswith("\n\n") and "[DONE]" not in answer.text
    return [json.loads(frame.removeprefix("data: ")) for frame in answer.text.split("\n\n") if frame]


def test_a_prompt_is_continued_whole(client: TestClient, engine: SlotEngine) -> None:
    engine.script = Script(hit_tokens=1)
    answer = client.post(
        "/completion", json={"prompt": "Hi", "n_predict": 9, "temperature": 0.5, "stop": ["x"]}
    ).json()
    assert answer.pop("timings")["predicted_n"] == 3 and answer.pop("cache")["hit_tokens"] == 1
    settings = answer.pop("generation_settings")
    assert (settings["n_predict"], settings["temperature"], settings["stop"]) == (9, 0.5, ["x"])
    assert answer == {
        "index": 0, "content": "Hello there.", "tokens": [], "id_slot": 0, "stop": True, "model": "tiny",
        "tokens_predicted": 3, "tokens_evaluated": 2, "tokens_cached": 1, "prompt": "Hi", "truncated": False,
        "stop_type": "eos", "stopping_word": "",
    }  # fmt: skip
    assert client.post("/completion", json={"prompt": "Hi", "return_tokens": True}).json()["tokens"] == [0, 1, 2]


def test_a_stream_has_an_event_for_each_text_and_a_last_one(client: TestClient) -> None:
    *told, last = events(client.post("/completion", json={"prompt": "Hi", "stream": True}))
    assert [(event["content"], event["tokens"], event["stop"]) for event in told] == [
        ("Hello", [0], False), (" there", [1], False), (".", [2], False),
    ]  # fmt: skip
    assert [event["tokens_predicted"] for event in told] == [1, 2, 3]
    assert (last["content"], last["tokens"], last["stop"], last["stop_type"]) == ("", [], True, "eos")
    assert last["timings"]["prompt_n"] == 2


def test_an_answer_says_which_text_stopped_it(client: TestClient, engine: SlotEngine) -> None:
    engine.script = Script(stop_text="x")
    answer = client.post("/completion", json={"prompt": "Hi"}).json()
    assert (answer["stop_type"], answer["stopping_word"]) == ("word", "x")


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("Hi", [72, 105]),
        (["Hi"], [72, 105]),
        ([72, 105], [72, 105]),
        ([[72, 105]], [72, 105]),
        ([1, "Hi", 2], [1, 72, 105, 2]),
        (["Hi", 2, "!"], [72, 105, 2, 33]),
    ],
)
def test_a_prompt_is_text_or_tokens_or_both(
    client: TestClient, engine: SlotEngine, prompt: Any, tokens: list[int]
) -> None:
    assert client.post("/completion", json={"prompt": prompt}).status_code == 200
    assert engine.requests[-1].tokens.tolist() == tokens


def test_the_fields_of_llama_cpps_clients_reach_the_engine(client: TestClient, engine: SlotEngine) -> None:
    body = {
        "prompt": "Hi", "n_predict": -1, "temperature": 0.3, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8,
        "repeat_penalty": 1.2, "repeat_last_n": 32, "presence_penalty": 0.1, "frequency_penalty": 0.2, "seed": -1,
        "stop": ["a", "b"], "cache_prompt": False, "id_slot": 3, "ignore_eos": True, "n_probs": 0, "mirostat": 0,
        "logit_bias": [[5, 1.5], [6, False]], "timings_per_token": True, "n_keep": 0, "samplers": None,
    }  # fmt: skip
    assert client.post("/completion", json=body).status_code == 200
    (request,) = engine.requests
    sampling = request.sampling
    assert (request.max_tokens, request.stop) == (198, ("a", "b"))
    assert (request.cache_prompt, request.ignore_eos) == (False, True)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.3, 4, 0.9, 0.1)
    assert (sampling.typical_p, sampling.repetition_penalty, sampling.repeat_last_n) == (0.8, 1.2, 32)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.seed) == (0.1, 0.2, None)
    assert sampling.logit_bias == ((5, 1.5), (6, -100.0))
    assert client.post("/completion", json={"prompt": "Hi", "n_predict": 0}).status_code == 200
    assert engine.requests[-1].max_tokens == 0


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "prompt: Field required"),
        ({"prompt": ["a", "b"]}, "prompt: Input should be a text, or a list of token ids and texts"),
        ({"prompt": {"prompt_string": "a"}}, "prompt: Input should be a text"),
        ({"prompt": ""}, "prompt: the prompt is empty"),
        ({"prompt": [5000]}, "prompt[0]: 5000 is no token id from 0 to 1023"),
        ({"prompt": ["x" * 300, 1]}, "prompt"),
        ({"prompt": "Hi", "n_predict": -2}, "n_predict: Input should be greater than or equal to 0"),
        ({"prompt": "Hi", "n_probs": 5}, "n_probs is not supported"),
        ({"prompt": "Hi", "n": 2}, "n is not supported: there is one answer to one prompt"),
        ({"prompt": "Hi", "logit_bias": [["Hello", 1]]}, "logit_bias: 'Hello' is no token id"),
        ({"prompt": "Hi", "grammar": 'root ::= "a"', "json_schema": {}}, "an answer is bound by one field only"),
    ],
)
def test_what_a_completion_cannot_have_is_refused_by_name(client: TestClient, fields: Any, word: str) -> None:
    error = client.post("/completion", json=fields).json()["error"]
    assert (error["code"], error["type"]) == (400, "invalid_request_error")
    assert word in error["message"]


# ------------------------------------------------------------------------------------------------- slots, properties


def test_slots_say_whether_they_are_at_work(client: TestClient, engine: SlotEngine) -> None:
    engine.busy = frozenset({1})
    assert client.get("/slots?fail_on_no_slot=1").json() == [
        {"id": 0, "n_ctx": 200, "speculative": False, "is_processing": False},
        {"id": 1, "n_ctx": 200, "speculative": False, "is_processing": True},
    ]
    engine.busy, engine.drafts = frozenset({0, 1}), DRAFTS
    assert [slot["speculative"] for slot in client.get("/slots").json()] == [True, True]
    full = client.get("/slots?fail_on_no_slot=1")
    assert (full.status_code, full.headers["retry-after"]) == (503, "1")
    assert full.json() == {"error": {"code": 503, "message": "no slot is free", "type": "unavailable_error"}}


def test_properties_say_what_holds_by_default(client: TestClient) -> None:
    shown = client.get("/props").json()
    assert shown["default_generation_settings"]["n_ctx"] == 200
    assert shown["default_generation_settings"]["params"] == {
        "n_predict": -1, "temperature": 0.7, "top_k": 20, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0,
        "top_n_sigma": 0.0, "xtc_probability": 0.0, "xtc_threshold": 0.1, "repeat_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "dry_multiplier": 0.0, "dry_base": 1.75,
        "dry_allowed_length": 2, "dry_penalty_last_n": -1, "stop": [],
    }  # fmt: skip
    assert (shown["total_slots"], shown["model_alias"], shown["chat_template"]) == (2, "tiny", "{{ messages }}")
    assert (shown["bos_token"], shown["eos_token"]) == ("<s>", "</s>")
    assert shown["modalities"] == {"vision": False, "audio": False}


def test_a_slot_that_a_request_asks_for_is_a_hint(client: TestClient) -> None:
    assert client.post("/v1/chat/completions", json={"messages": HI, "id_slot": 1}).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/tokenize", 405, "invalid_request_error"),
        ("POST", "/props", 405, "invalid_request_error"),
        ("POST", "/slots/0?action=save", 404, "not_found_error"),
        ("GET", "/completion", 405, "invalid_request_error"),
        ("POST", "/infill", 404, "not_found_error"),
        ("GET", "/lora-adapters", 404, "not_found_error"),
        ("GET", "/props?model=other", 404, "not_found_error"),
    ],
)
def test_what_is_missing_says_so_in_its_shape(
    client: TestClient, method: str, path: str, status: int, kind: str
) -> None:
    error = client.request(method, path).json()["error"]
    assert (error["code"], error["type"]) == (status, kind)


# -------------------------------------------------------------------------------------------------------------- live


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tiny_models.write("llama", tmp_path_factory.mktemp("llama") / "tiny")
    with serving(folder, slots=2) as server:
        yield server


TEXTS = ["", "Hello there", " two  spaces\n\n", "<|im_start|>user\nHi 🙂 日本語<|im_end|>", "x" * 5000]


@pytest.mark.parametrize("text", TEXTS)
def test_a_real_tokenizer_is_asked(live: Live, text: str) -> None:
    tokens = live.post("/tokenize", content=text).json()["tokens"]
    assert tokens == tiny_models.tokenizer().encode(text, add_special_tokens=False)
    assert live.post("/detokenize", tokens=tokens).json()["content"] == text
    pieces = live.post("/tokenize", content=text, with_pieces=True).json()["tokens"]
    assert [piece["id"] for piece in pieces] == tokens
    assert b"".join(as_bytes(piece["piece"]) for piece in pieces).decode() == text


def as_bytes(piece: str | list[int]) -> bytes:
    return piece.encode() if isinstance(piece, str) else bytes(piece)


def test_names_of_special_tokens_may_be_text(live: Live) -> None:
    marker = tiny_models.tokenizer().eos_token
    assert len(live.post("/tokenize", content=marker).json()["tokens"]) == 1
    plain = live.post("/tokenize", content=marker, parse_special=False).json()["tokens"]
    assert len(plain) > 1 and live.post("/detokenize", tokens=plain).json()["content"] == marker
    # It did not change how anything else is read.
    assert len(live.post("/tokenize", content=marker).json()["tokens"]) == 1


def test_the_prompt_is_the_one_that_is_evaluated(live: Live) -> None:
    fields = {"messages": [user("Hello")], "enable_thinking": False}
    prompt = live.post("/apply-template", **fields).json()["prompt"]
    tokens = live.post("/tokenize", content=prompt).json()["tokens"]
    asked = live.post("/v1/chat/completions", max_tokens=1, **fields).json()
    counted = live.post("/v1/chat/completions/input_tokens", **fields).json()
    assert counted["input_tokens"] == asked["usage"]["prompt_tokens"] == len(tokens)


def test_a_running_request_is_seen_and_nothing_of_its_words(live: Live) -> None:
    assert [slot["is_processing"] for slot in live.http.get("/slots").json()] == [False, False]
    connection = raw_request(live, stream=True, max_tokens=3000, messages=[user("A very secret word")])
    until(lambda: any(slot["is_processing"] for slot in live.http.get("/slots").json()))
    assert live.http.get("/slots?fail_on_no_slot=1").status_code == 200
    other = {"authorization": "Bearer another key"}
    assert "secret" not in live.http.get("/slots", headers=other).text + live.http.get("/props", headers=other).text
    connection.close()
    live.wait_until_idle()
    until(lambda: not any(slot["is_processing"] for slot in live.http.get("/slots").json()))


def test_properties_of_a_real_model(live: Live) -> None:
    shown = live.http.get("/props").json()
    assert shown["chat_template"] == tiny_models.CHAT_TEMPLATE
    assert shown["eos_token"] == tiny_models.tokenizer().eos_token
    assert shown["default_generation_settings"]["n_ctx"] == tiny_models.CONTEXT
    assert shown["total_slots"] == 2 and str(httpx.URL(live.address)) not in str(shown)


def test_the_text_of_a_conversation_is_answered_as_the_conversation_is(live: Live) -> None:
    fields = {"messages": [user("Hello")], "temperature": 0, "seed": 1}
    prompt = live.post("/apply-template", **fields).json()["prompt"]
    asked = live.post("/v1/completions", prompt=prompt, max_tokens=6, temperature=0).json()
    tokens = live.post("/tokenize", content=prompt).json()["tokens"]
    for written in (prompt, tokens, [*tokens[:3], *(live.post("/detokenize", tokens=tokens[3:]).json()["content"],)]):
        told = live.post("/completion", prompt=written, n_predict=6, temperature=0, return_tokens=True).json()
        assert (told["content"], told["tokens_predicted"]) == (asked["choices"][0]["text"], len(told["tokens"]))
        assert told["prompt"].endswith(prompt) and told["stop_type"] in ("limit", "eos")
    assert told["tokens_cached"] == told["tokens_evaluated"] - told["timings"]["prompt_n"] > 0
    (think,) = live.post("/tokenize", content="<think>").json()["tokens"]
    fields = {"grammar": 'root ::= "yes" | "no"', "logit_bias": [[think, False]], "n_predict": 9}
    bound = live.post("/completion", prompt="x", **fields).json()
    assert (bound["content"] in ("yes", "no"), bound["stop_type"]) == (True, "eos")
    assert live.post("/completion", prompt="x", n_predict=0).json()["content"] == ""


# ---------------------------------------------------------------------------------------------------------- progress


def told(answer: Any) -> list[tuple[int, int, int]]:
    """What each event of a stream tells of the prompt, before the first text; it tells nothing afterwards."""
    events = [
        json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: {")
    ]
    progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert all("prompt_progress" not in event for event in events[len(progress) + ("choices" in events[0]) :])
    assert [one["time_ms"] for one in progress] == sorted(one["time_ms"] for one in progress)
    return [(one["total"], one["cache"], one["processed"]) for one in progress]


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/completions", {"prompt": "HiHiHiHi"}),
        ("/completion", {"prompt": "HiHiHiHi"}),
    ],
)
def test_a_stream_tells_how_far_the_prompt_is_if_asked(
    client: TestClient, engine: SlotEngine, path: str, prompt: Any
) -> None:
    engine.script = Script(hit_tokens=2, progress=(4, 6, 7))
    asked = {**prompt, "stream": True, "return_progress": True}
    assert told(client.post(path, json=asked)) == [(8, 2, 2), (8, 2, 4), (8, 2, 6), (8, 2, 8)]
    assert told(client.post(path, json={**asked, "return_progress": False})) == []
    assert "prompt_progress" not in client.post(path, json={**asked, "stream": False}).json()


def test_the_progress_of_a_real_prompt_ends_where_the_prompt_does(live: Live) -> None:
    asked = {"prompt": "one two three " * 120, "n_predict": 2, "stream": True, "return_progress": True}
    first, again = (told(live.post("/completion", **asked)) for _ in range(2))
    total = first[0][0]
    assert len(first) > 2 and first[-1] == (total, 0, total) and first == sorted(first)
    assert 0 < again[0][1] == again[0][2] < total and again[-1] == (total, again[0][1], total)
