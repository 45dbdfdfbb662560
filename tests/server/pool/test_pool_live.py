"""Several real models in one process: loaded and unloaded while others answer, and found again as they were."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest

from server.api.app import create_pool_app
from server.app.config import ServerConfig
from server.app.service import ServiceOpener
from server.pool.catalog import Catalog
from server.pool.members import Around, Member
from server.pool.memory import PoolMemory, PoolSettings
from server.pool.names import ModelSource
from server.pool.pool import ModelPool
from tests.support import tiny_models
from tests.support.live_server import running

WAIT_SECONDS = 120.0
MIB = 1 << 20
CHAT = "/v1/chat/completions"
LONG = [{"role": "user", "content": "Tell me of rivers, hills and the sea. " * 20}]


class PausingOpener(ServiceOpener):
    """Waits before the last step of each loading until the test lets it go on."""

    may_finish: threading.Event

    def open(self, source: ModelSource, around: Around, tell: Callable[[str], object]) -> Member:
        def paused(step: str) -> None:
            tell(step)
            if step == "trying it out":
                assert self.may_finish.wait(WAIT_SECONDS)

        return super().open(source, around, paused)


class Several:
    """A server of tiny models, and how to ask it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        sources = [ModelSource(name, tiny_models.write(name, folder / name)) for name in ("llama", "lfm2")]
        cache = settings.pop("cache", {})
        config = ServerConfig(cache_memory_bytes=256 * MIB, heartbeat_seconds=0.02, **cache)
        self.opener = PausingOpener(config, PoolMemory(4096 * MIB, 256 * MIB), 2048 * MIB)
        object.__setattr__(self.opener, "may_finish", threading.Event())
        self.opener.may_finish.set()
        pool_settings = replace(PoolSettings(self.opener.memory), **settings)
        self.pool = ModelPool(Catalog(sources, has_others=False), opener=self.opener, settings=pool_settings)
        self._running = running(create_pool_app(self.pool, config))

    def __enter__(self) -> "Several":
        self.client = httpx.Client(base_url=self._running.__enter__(), timeout=WAIT_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self.opener.may_finish.set()
        self.client.close()
        self._running.__exit__(None, None, None)
        self.pool.stop()

    def ask(self, model: str, messages: Any = LONG, **fields: Any) -> Any:
        body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 8, "ignore_eos": True, **fields}
        answer = self.client.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def unload(self, model: str) -> None:
        """Unloads as Ollama's clients do, and waits for it."""
        self.client.post("/api/chat", json={"model": model, "messages": [], "keep_alive": 0})
        until(lambda: model not in self.pool.engines)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.001)


def content(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture(scope="module", params=["memory", "disk"])
def several(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    folder = tmp_path_factory.mktemp("models")
    disk = {"cache_disk_bytes": 256 * MIB, "cache_dir": str(folder / "disk")}
    with Several(folder, cache=disk if request.param == "disk" else {}) as one:
        yield one


@pytest.mark.parametrize("model", ["llama", "lfm2"])
def test_a_conversation_is_found_again_when_its_model_is_loaded_again(several: Several, model: str) -> None:
    first = several.ask(model)
    turn = [*LONG, {"role": "assistant", "content": content(first)}, {"role": "user", "content": "And of lakes?"}]
    several.unload(model)
    again = several.ask(model, turn)
    assert cached(first) == 0
    assert cached(again) > 0.8 * first["usage"]["prompt_tokens"], "it was evaluated again"
    cold = several.ask(model, turn, cache_prompt=False)
    assert cached(cold) == 0 and content(cold) == content(again)


def test_an_unloaded_model_leaves_no_weights_behind(several: Several) -> None:
    several.ask("llama")
    several.ask("lfm2")
    weights = {member.source.id: member.weights_bytes for member in several.pool.members}
    before = mx.get_active_memory()
    several.unload("lfm2")
    # What its conversations leave there is less than its weights, which are small themselves.
    until(lambda: before - mx.get_active_memory() > 0.5 * weights["lfm2"])
    assert content(several.ask("llama"))


def test_a_stream_goes_on_while_another_model_is_loaded(several: Several) -> None:
    several.ask("llama")
    several.unload("lfm2")
    several.opener.may_finish.clear()
    other: list[Any] = []
    asking = threading.Thread(target=lambda: other.append(several.ask("lfm2")))
    body = {"model": "llama", "messages": LONG, "max_tokens": 400, "ignore_eos": True, "stream": True}
    num_while_loading = 0
    with several.client.stream("POST", CHAT, json=body) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        next(lines)
        asking.start()
        for line in lines:
            if several.pool.loading.get("lfm2") == "trying it out":
                num_while_loading += bool(json.loads(line.removeprefix("data: "))["choices"])
            if num_while_loading >= 5:
                break
    several.opener.may_finish.set()
    asking.join(WAIT_SECONDS)
    assert num_while_loading >= 5, "the stream stood still while the other model was loaded"
    assert content(other[0])


def test_two_models_that_do_not_fit_together_take_turns_and_find_their_conversations(tmp_path: Path) -> None:
    with Several(tmp_path, max_models=1) as server:
        for _ in range(2):
            for model in ("llama", "lfm2"):
                answer = server.ask(model)
                assert list(server.pool.engines) == [model]
                last = cached(answer)
        assert last > 100


def test_conversations_of_an_unloaded_model_can_be_forgotten(tmp_path: Path) -> None:
    with Several(tmp_path) as server:
        num_tokens = server.ask("llama")["usage"]["prompt_tokens"]
        server.unload("llama")
        until(lambda: "llama" in server.pool.budgets.unloaded)
        elsewhere = server.client.post("/v1/cache/clear?model=llama&cache_salt=other").json()
        assert elsewhere["freed_tokens"] == 0
        freed = server.client.post("/v1/cache/clear?model=llama").json()
        assert freed["freed_tokens"] >= num_tokens and freed["freed_bytes"] > 0
        assert cached(server.ask("llama")) == 0


def test_a_session_is_forgotten_while_its_model_is_unloaded(tmp_path: Path) -> None:
    with Several(tmp_path) as server:
        server.ask("llama", session_id="s")
        server.unload("llama")
        until(lambda: "llama" in server.pool.budgets.unloaded)
        kept = server.pool.budgets.unloaded["llama"]
        assert kept.last("", "s") is not None
        assert server.client.delete("/v1/sessions/s").status_code == 200
        assert kept.last("", "s") is None


def test_conversations_given_up_with_their_model_are_told_so(tmp_path: Path) -> None:
    with Several(tmp_path) as server:
        first = server.ask("llama", session_id="s")
        server.unload("llama")
        until(lambda: "llama" in server.pool.budgets.unloaded)
        server.pool.budgets.give_up("llama", "tests")
        turn = [*LONG, {"role": "assistant", "content": content(first)}, {"role": "user", "content": "And of lakes?"}]
        again = server.ask("llama", turn, session_id="s")
        assert cached(again) == 0
        assert (again["cache"]["miss"]["reason"], again["cache"]["miss"]["cause"]) == (
            "model_unloaded",
            "unloaded model",
        )


def change_one_weight(folder: Path) -> None:
    """As training of a token that was added would: nothing else of the model differs."""
    file = str(folder / "model.safetensors")
    arrays: Any = mx.load(file)
    arrays["model.embed_tokens.weight"][-1, -1] = 7.0
    mx.eval(arrays)
    mx.save_safetensors(file, arrays, metadata={"format": "mlx"})


def change_template(folder: Path) -> None:
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{# changed #}")


def change_sampling(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": 0.3}')


def touch(folder: Path) -> None:
    for path in folder.iterdir():
        os.utime(path, (1, 1))


@pytest.mark.parametrize("keeps", ["memory", "disk"])
@pytest.mark.parametrize(
    ("change", "is_same"),
    [(change_one_weight, False), (change_template, False), (change_sampling, True), (touch, True)],
)
def test_state_never_meets_a_model_that_has_changed(
    tmp_path: Path, keeps: str, change: Callable[[Path], None], is_same: bool, caplog: pytest.LogCaptureFixture
) -> None:
    disk = {"cache_disk_bytes": 256 * MIB, "cache_dir": str(tmp_path / "disk")} if keeps == "disk" else {}
    with Several(tmp_path, cache=disk) as server:
        first = server.ask("llama", session_id="s")
        turn = [*LONG, {"role": "assistant", "content": content(first)}, {"role": "user", "content": "And of lakes?"}]
        server.unload("llama")
        change(tmp_path / "llama")
        again = server.ask("llama", turn, session_id="s")
        if is_same:
            assert cached(again) > 0.8 * first["usage"]["prompt_tokens"]
            assert "other files" not in caplog.text and "have changed" not in caplog.text
            return
        assert cached(again) == 0
        if keeps == "memory":
            assert again["cache"]["miss"]["reason"] == "model_unloaded"
            assert "the files of llama have changed: its conversations begin anew" in caplog.text
        else:
            assert "they are not used" in caplog.text or "of other weights" in caplog.text
        assert content(again) == content(server.ask("llama", turn, session_id="s"))


def test_an_idle_model_leaves_memory_to_another_and_gets_what_it_is_due_for_its_next_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.pool.members.IDLE_SECONDS", 0.2)
    with Several(tmp_path) as server:

        def budgets() -> dict[str, int]:
            return {name: engine.stats().cache.budget_bytes for name, engine in server.pool.engines.items()}

        first = server.ask("llama")
        server.ask("lfm2")
        time.sleep(0.3)
        # As if it used all of its budget.
        engine = server.pool.engines["lfm2"]
        stats = engine.stats
        full = replace(stats().cache, stored_bytes=128 * MIB)
        monkeypatch.setattr(engine, "stats", lambda: replace(stats(), cache=full))
        server.ask("lfm2", [{"role": "user", "content": "And the hills?"}])
        # The memory is divided once the answer has been sent.
        until(lambda: budgets()["llama"] <= 96 * MIB)
        monkeypatch.undo()
        assert sum(budgets().values()) <= 256 * MIB
        turn = [*LONG, {"role": "assistant", "content": content(first)}, {"role": "user", "content": "And of lakes?"}]
        again = server.ask("llama", turn)
        assert budgets()["lfm2"] == budgets()["llama"] == 128 * MIB
        assert cached(again) > 0.8 * first["usage"]["prompt_tokens"], (
            "what it uses is taken while other memory is not"
        )


def test_a_damaged_model_is_told_by_its_file_but_not_by_its_path(tmp_path: Path) -> None:
    with Several(tmp_path) as server:
        weights = tmp_path / "llama" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        answer = server.client.post(CHAT, json={"model": "llama", "messages": LONG})
        assert answer.status_code == 503
        assert "model.safetensors is incomplete" in answer.text and str(tmp_path) not in answer.text
        (tmp_path / "lfm2" / "config.json").write_text('{"model_type": "unheard_of"}')
        answer = server.client.post(CHAT, json={"model": "lfm2", "messages": LONG})
        assert answer.status_code == 503 and "unheard_of" in answer.text


def test_a_model_whose_disk_folder_another_server_has_open_is_told_so(tmp_path: Path) -> None:
    disk = {"cache_disk_bytes": 256 * MIB, "cache_dir": str(tmp_path / "disk")}
    with Several(tmp_path / "one", cache=disk) as one, Several(tmp_path / "two", cache=disk) as other:
        assert content(one.ask("llama"))
        answer = other.client.post(CHAT, json={"model": "llama", "messages": LONG})
        assert answer.status_code == 503
        assert "--cache-disk" in answer.text and str(tmp_path) not in answer.text
        assert content(other.ask("lfm2"))
