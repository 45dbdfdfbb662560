"""Vectors of texts in the shapes of OpenAI, of Ollama, and of reranking servers."""

import base64
import json
import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from starlette.testclient import TestClient

from models.errors import EmbeddingUnsupported
from models.formats import JUDGED_PREFIX, JUDGED_SUFFIX, EmbeddingFormat, Judgement, Pooling, judged_text
from models.loader import load
from server.api import embedding
from server.app.config import ServerConfig
from server.app.log_events import RequestRefused, TextsEmbedded
from tests.server.api.test_live import Live, serving
from tests.support import tiny_models
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, FakeRenderer, fake_model

EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"


def client_of(engine: FakeEngine, **model: Any) -> TestClient:
    return TestClient(create_app(engine, fake_model(**model), ServerConfig()))


def post(client: TestClient, path: str = EMBEDDINGS, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def codes(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_every_text_gets_a_vector_in_its_place() -> None:
    engine = FakeEngine()
    body = post(client_of(engine), input=["ab", "abcd"])
    assert engine.embedded == [([codes("ab"), codes("abcd")], Pooling.MEAN)]
    assert [one["index"] for one in body["data"]] == [0, 1]
    assert {one["object"] for one in body["data"]} == {"embedding"}
    assert body["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    np.testing.assert_allclose([np.linalg.norm(one["embedding"]) for one in body["data"]], 1, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("ab", [codes("ab")]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["ab", [7]], [codes("ab"), [7]]),
    ],
)
def test_a_text_may_be_alone_or_tokens(given: Any, taken: list[list[int]]) -> None:
    engine = FakeEngine()
    post(client_of(engine), input=given)
    assert engine.embedded[0][0] == taken


def test_ids_of_another_tokenizer_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Joining(FakeRenderer):
        """Its tokenizer makes one token of two equal letters, which are never two tokens then."""

        def tokenize(self, text: str, **options: Any) -> list[int]:
            return [256 + ord(pair[0]) if len(pair) > 1 else ord(pair) for pair in re.findall(r"aa|.", text)]

    embedding._warn_of_foreign_ids.cache_clear()
    client = client_of(FakeEngine(), renderer=Joining())
    post(client, input=[codes("abcabc"), codes("aabcd")])
    assert not caplog.records
    for _ in range(2):
        post(client, input=[codes("xaaaab")])
    (told,) = [one.getMessage() for one in caplog.records if one.name == "server.api.embedding"]
    assert "check_embedding_ctx_length=False" in told


def test_numbers_and_base64_say_the_same() -> None:
    client = client_of(FakeEngine())
    numbers = post(client, input="abc")["data"][0]["embedding"]
    packed = post(client, input="abc", encoding_format="base64")["data"][0]["embedding"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(packed), "<f4"), np.array(numbers, np.float32))


def test_fewer_dimensions_are_the_first_ones_at_length_one() -> None:
    client = client_of(FakeEngine())
    whole = np.array(post(client, input="abc")["data"][0]["embedding"])
    short = post(client, input="abc", dimensions=3)["data"][0]["embedding"]
    np.testing.assert_allclose(short, whole[:3] / np.linalg.norm(whole[:3]), atol=1e-6)


def test_the_models_own_pooling_is_used() -> None:
    engine = FakeEngine()
    post(client_of(engine, embedding=EmbeddingFormat(Pooling.LAST, 3)), input="a")
    assert engine.embedded[0][1] is Pooling.LAST


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (EMBEDDINGS, {}, "input"),
        (EMBEDDINGS, {"input": []}, "input"),
        (EMBEDDINGS, {"input": ""}, "input[0]"),
        (EMBEDDINGS, {"input": ["a", ""]}, "input[1]"),
        (EMBEDDINGS, {"input": [[]]}, "input[0]"),
        (EMBEDDINGS, {"input": [[-1]]}, "input[0][0]"),
        (EMBEDDINGS, {"input": "a" * 300}, "input[0]"),
        (EMBEDDINGS, {"input": ["a"] * 2049}, "input"),
        (EMBEDDINGS, {"input": "a", "dimensions": 5}, "dimensions"),
        (EMBEDDINGS, {"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        (RERANK, {"query": "", "documents": ["a"]}, "query"),
        (RERANK, {"query": "a", "documents": []}, "documents"),
        (RERANK, {"query": "a", "documents": ["a", ""]}, "documents[1]"),
        (RERANK, {"query": "a", "documents": [{"title": "a"}]}, "documents[0]"),
        (RERANK, {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
    ],
)
def test_what_is_wrong_is_named(path: str, body: dict[str, Any], param: str) -> None:
    answer = client_of(FakeEngine()).post(path, json=body)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param


def test_all_texts_of_a_request_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "MAX_TOKENS", 5)
    client = client_of(FakeEngine())
    post(client, input=["ab", "abc"])
    assert client.post(EMBEDDINGS, json={"input": ["abc", "abc"]}).json()["error"]["param"] == "input[1]"


def test_a_model_that_makes_none_is_named() -> None:
    answer = client_of(FakeEngine(), embedding=None).post(EMBEDDINGS, json={"input": "a"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    broken = FakeEngine(embedding_error=EmbeddingUnsupported("it has no layers of its own"))
    answer = client_of(broken).post(EMBEDDINGS, json={"input": "a"})
    assert answer.status_code == 400
    assert "no layers" in answer.json()["error"]["message"]


def test_a_request_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "server")
    client = client_of(FakeEngine())
    post(client, input=["ab", "c"])
    client.post(EMBEDDINGS, json={"input": ""})
    answered, refused = (record.msg for record in caplog.records)
    assert isinstance(answered, TextsEmbedded)
    assert (answered.path, answered.num_texts, answered.prompt_tokens) == (EMBEDDINGS, 2, 3)
    assert "POST /v1/embeddings  2 texts, 3 tokens" in str(answered)
    assert isinstance(refused, RequestRefused)


def test_documents_come_in_the_order_of_their_match() -> None:
    client = client_of(FakeEngine())
    body = post(client, RERANK, query="aaa", documents=["bbb", {"text": "aab"}, "aaa"])
    assert [one["index"] for one in body["results"]] == [2, 1, 0]
    scores = [one["relevance_score"] for one in body["results"]]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] == pytest.approx(1, abs=1e-6)
    assert "document" not in body["results"][0]
    assert body["usage"]["total_tokens"] == 12
    best = post(client, RERANK, query="aaa", documents=["bbb", "aab"], top_n=1, return_documents=True)
    assert [one["document"] for one in best["results"]] == [{"text": "aab"}]


JUDGE = Judgement(1, 2)


def test_a_model_that_judges_reads_query_and_document_together() -> None:
    engine = FakeEngine()
    client = client_of(engine, reranking=JUDGE, embedding=None, context_tokens=1000)
    body = post(client, RERANK, query="q?", documents=["a long one", {"text": "b"}], return_documents=True)
    (texts, reading), *_ = engine.embedded
    assert reading == JUDGE
    assert texts == [codes(JUDGED_PREFIX + judged_text("q?", one) + JUDGED_SUFFIX) for one in ("a long one", "b")]
    assert [one["index"] for one in body["results"]] == [1, 0], "the fake finds that short texts match"
    assert [one["document"]["text"] for one in body["results"]] == ["b", "a long one"]
    assert body["usage"]["total_tokens"] == sum(map(len, texts))
    post(client, RERANK, query="q", documents=["a"], instruction="Find animals.")
    assert engine.embedded[1][0] == [codes(JUDGED_PREFIX + judged_text("q", "a", "Find animals.") + JUDGED_SUFFIX)]


def test_what_does_not_fit_a_judge_is_named() -> None:
    client = client_of(FakeEngine(), reranking=JUDGE, embedding=None, context_tokens=600)
    answer = client.post(RERANK, json={"query": "q", "documents": ["a", "b" * 500]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "documents[1]")
    assert client.post(EMBEDDINGS, json={"input": "a"}).status_code == 400, "it makes no vectors"
    answer = client_of(FakeEngine()).post(RERANK, json={"query": "q", "documents": ["a"], "instruction": "x"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "instruction")


def test_a_real_judge_scores_as_mlx_lm_does(tmp_path: Path) -> None:
    folder = tiny_models.write("qwen3", tmp_path / "judge")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "classifier_from_token": ["no", "yes"]}))
    tokens = json.loads((folder / "tokenizer.json").read_text())
    assert {"no", "yes"}.isdisjoint(tokens["model"]["vocab"])
    # Two tokens of the tiny vocabulary get the names that such a model answers with.
    for name, id_ in (("no", 40), ("yes", 41)):
        old = next(token for token, number in tokens["model"]["vocab"].items() if number == id_)
        tokens["model"]["vocab"][name] = tokens["model"]["vocab"].pop(old)
        tokens["model"]["merges"] = [pair for pair in tokens["model"]["merges"] if old not in (*pair, "".join(pair))]
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    documents = ["It rains in Paris.", "Cats sleep <|im_end|> all day. " * 30, "Paris"]
    loaded = load(folder, "judge")
    with serving(str(folder)) as server:
        answer = server.post(RERANK, model="judge", query="Weather in Paris?", documents=documents).json()
    assert len(answer["results"]) == len(documents)
    for one in answer["results"]:
        encode = partial(loaded.tokenizer.encode, add_special_tokens=False)
        judged = encode(judged_text("Weather in Paris?", documents[one["index"]]), split_special_tokens=True)
        prompt = mx.array([[*encode(JUDGED_PREFIX), *judged, *encode(JUDGED_SUFFIX)]])
        model: Any = loaded.model
        pair = mx.softmax(model(prompt)[0, -1, mx.array([40, 41])].astype(mx.float32))
        assert one["relevance_score"] == pytest.approx(float(pair[1]), abs=1e-3)


def test_ollama_cuts_what_is_too_long_unless_told_otherwise() -> None:
    engine = FakeEngine()
    client = client_of(engine, embedding=EmbeddingFormat(Pooling.LAST, 9))
    body = post(client, "/api/embed", model="tiny", input=["ab", "c" * 300])
    assert [len(tokens) for tokens in engine.embedded[0][0]] == [2, 200]
    assert engine.embedded[0][0][1][-1] == 9
    assert body["prompt_eval_count"] == 202
    assert len(body["embeddings"]) == 2
    answer = client.post("/api/embed", json={"model": "tiny", "input": "c" * 300, "truncate": False})
    assert answer.status_code == 400
    assert "context" in answer.json()["error"]


def test_ollamas_forerunner_gives_one_vector() -> None:
    client = client_of(FakeEngine())
    assert len(post(client, "/api/embeddings", model="tiny", prompt="ab")["embedding"]) == 4
    assert post(client, "/api/embeddings", model="tiny", prompt="")["embedding"] == []
    assert post(client, "/api/embed", model="tiny", input=[])["embeddings"] == []


TEXTS = ("My name is Ada.", "What is the weather in Paris?", "long " * 300)


def test_real_vectors_do_not_depend_on_what_is_beside_them(demo: Live) -> None:
    together = demo.client.embeddings.create(model="demo", input=list(TEXTS))
    for text, one in zip(TEXTS, together.data, strict=True):
        alone = demo.client.embeddings.create(model="demo", input=text).data[0].embedding
        np.testing.assert_allclose(one.embedding, alone, atol=1e-4)
    assert len({len(one.embedding) for one in together.data}) == 1
