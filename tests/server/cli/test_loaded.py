"""`mlx-serve ps`, `stop` and `decide` against servers on this machine."""

import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.api.app import create_pool_app
from server.app.config import ConfigError, ServerConfig, StartError
from server.cli import ask
from server.pool.memory import PoolSettings
from server.pool.pool import ModelPool
from tests.support.fake_opener import FakeOpener, catalog
from tests.support.live_server import running

NOBODY = "http://127.0.0.1:9"


def show_loaded(urls: list[str], key: str | None, *, as_json: bool) -> None:
    """`mlx-serve ps` where servers stand at `urls`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ask, "known_urls", lambda: urls)
        ask.ps(key, as_json)


def unload(name: str, urls: list[str], key: str | None, *, as_json: bool) -> None:
    """`mlx-serve stop` where servers stand at `urls`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ask, "known_urls", lambda: urls)
        ask.stop(name, key, as_json)


@pytest.fixture
def url() -> Iterator[str]:
    settings = PoolSettings(keep_alive_seconds=1800)
    pool = ModelPool(catalog("a", "b"), opener=FakeOpener(), settings=settings)
    with running(create_pool_app(pool, ServerConfig())) as address:
        httpx.post(f"{address}/v1/models/load", json={"model": "a"}).raise_for_status()
        yield address


def test_ps_tells_what_is_loaded_where_and_until_when(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_loaded([NOBODY, url], None, as_json=True)
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["name"], entry["server"], entry["context_tokens"]) == ("a", url, 200)
    assert 1700 < entry["idle_seconds_left"] <= 1800
    show_loaded([url], None, as_json=False)
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split()[0] == "NAME" and line.split()[0] == "a" and "30 minutes" in line


def test_ps_says_how_to_start_a_server_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    show_loaded([NOBODY], None, as_json=False)
    assert "mlx-serve serve" in capsys.readouterr().out
    show_loaded([NOBODY], None, as_json=True)
    assert json.loads(capsys.readouterr().out) == []


def test_ps_advises_to_start_no_server_where_one_runs_without_models(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    unload("a", [url], None, as_json=True)
    capsys.readouterr()
    show_loaded([NOBODY, url], None, as_json=False)
    assert capsys.readouterr().out == f"No model is loaded at {url}; one is loaded when a request names it.\n"


def test_ps_shows_what_the_other_servers_have_where_one_refuses(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    pool = ModelPool(catalog("c"), opener=FakeOpener(), settings=PoolSettings())
    with running(create_pool_app(pool, ServerConfig(api_key="secret"))) as locked:
        for urls in ([locked, url], [url, locked]):
            with pytest.raises(StartError, match=locked):
                show_loaded(urls, None, as_json=True)
            assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == ["a"]
        with pytest.raises(StartError, match=locked):
            show_loaded([locked], None, as_json=False)
        assert capsys.readouterr().out == ""


def test_stop_unloads_a_model_and_names_one_that_is_not_loaded(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    unload("a:latest", [NOBODY, url], None, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"name": "a:latest", "servers": [url]}
    for name in ("a", "b", "nope"):
        with pytest.raises(StartError, match="is not loaded by any server"):
            unload(name, [url], None, as_json=False)


def test_stop_says_why_a_server_refuses(url: str) -> None:
    with pytest.raises(StartError, match="operator's key"):
        unload("a", [url], "guest", as_json=False)


def test_stop_asks_the_other_servers_where_one_refuses(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    pool = ModelPool(catalog("a"), opener=FakeOpener(), settings=PoolSettings())
    app = create_pool_app(pool, ServerConfig(api_key="secret"))
    with running(app) as locked, pytest.raises(StartError, match=locked):
        unload("a", [locked, url], None, as_json=False)
    assert capsys.readouterr().out == "a is unloaded.\n"


def decide(url: str, state: str | None, *asked: str, **options: Any) -> None:
    ask.decide(url=url, api_key=None, state=state, ask=list(asked), **options)


def test_decide_prints_a_table_the_likeliest_answer_first(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    decide(url, "Hi", "Which?", options="a, bb,c", model="a")
    heading, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert heading == ["QUESTION", "ANSWER", "PROBABILITY"]
    assert rows[0][:2] == ["Which?", "a"] and sorted(row[-2] for row in rows) == ["a", "bb", "c"]
    chances = [float(row[-1]) for row in rows]
    assert chances == sorted(chances, reverse=True) and sum(chances) == pytest.approx(1, abs=0.002)


def test_decide_reads_a_pipe_and_asks_yes_or_no(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a mail"))
    decide(url, None, "Is it?", "Was it?", model="a", as_json=True)
    answers = json.loads(capsys.readouterr().out)["answers"]
    assert [one["name"] for one in answers] == ["Is it?", "Was it?"]
    decide(url, "a mail", "Is it?", model="a")
    assert {line.split()[-2] for line in capsys.readouterr().out.splitlines()[1:]} == {"yes", "no"}


def test_decide_says_what_lacks_or_is_wrong(url: str) -> None:
    with pytest.raises(ConfigError, match="--ask"):
        decide(url, "Hi")
    with pytest.raises(StartError, match="there is no model 'unknown/model': only a, b are served here"):
        decide(url, "Hi", "Is it?", model="unknown/model")
    with pytest.raises(StartError, match="empty text"):
        decide(url, "Hi", "Is it?", options="a,,b", model="a")
    with pytest.raises(StartError, match=f"no server answers at {NOBODY}.*mlx-serve serve starts one"):
        decide(NOBODY, "Hi", "Is it?")
