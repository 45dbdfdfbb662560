"""Several real models in one process: loaded and unloaded while others answer, and found again as they were."""

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest

from cache.history import HistoryFollower
from cache.memory_tier import PinName
from cache.prefix_cache import PrefixCache
from server.api.app import create_pool_app
from server.app.config import ServerConfig
from server.app.service import ServiceOpener
from server.engine.sequence import EngineState
from server.pool.catalog import Catalog
from server.pool.members import Around, Budgets, Member
from server.pool.memory import ModelUse, PoolMemory, PoolSettings, Pressure
from server.pool.names import ModelSource
from server.pool.pool import ModelPool
from tests.server.api.test_live import until
from tests.support import cache_driver, fake_model, tiny_models
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


def content(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def turn_after(answer: Any) -> list[Any]:
    return [*LONG, {"role": "assistant", "content": content(answer)}, {"role": "user", "content": "And of lakes?"}]


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
    turn = turn_after(first)
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


def test_what_an_unloaded_model_keeps_can_be_forgotten(tmp_path: Path) -> None:
    with Several(tmp_path) as server:
        num_tokens = server.ask("llama", session_id="s")["usage"]["prompt_tokens"]
        server.unload("llama")
        until(lambda: "llama" in server.pool.budgets.unloaded)
        kept = server.pool.budgets.unloaded["llama"]
        assert kept.last("", "s") is not None
        assert server.client.delete("/v1/sessions/s").status_code == 200
        assert kept.last("", "s") is None
        elsewhere = server.client.post("/v1/cache/clear?model=llama&cache_salt=other").json()
        assert elsewhere["freed_tokens"] == 0
        freed = server.client.post("/v1/cache/clear?model=llama").json()
        assert freed["freed_tokens"] >= num_tokens and freed["freed_bytes"] > 0
        assert cached(server.ask("llama")) == 0


def test_conversations_given_up_with_their_model_are_told_so(tmp_path: Path) -> None:
    with Several(tmp_path) as server:
        first = server.ask("llama", session_id="s")
        server.unload("llama")
        until(lambda: "llama" in server.pool.budgets.unloaded)
        server.pool.budgets.give_up("llama", "tests")
        turn = turn_after(first)
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
        turn = turn_after(first)
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
        turn = turn_after(first)
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


SAID = np.arange(20, dtype=np.int32)


def state_of(prompts: Sequence[Sequence[int]], pinned: Sequence[int] = ()) -> EngineState:
    prefix_cache = PrefixCache(lambda: fake_model.make_caches("T"), num_slots=2, budget_bytes=1 << 30)
    for prompt in prompts:
        cache_driver.run(prefix_cache, prompt)
    prefix_cache.park()
    if pinned:
        prefix_cache.pins.pin(PinName("", "s"), np.array(pinned, np.int32))
    return EngineState(prefix_cache)


def conversations(count: int) -> list[list[int]]:
    return [[first, *range(1, 40)] for first in range(100, 100 + count)]


def budgets_of(total_bytes: int, **states: EngineState) -> tuple[Budgets, list[str]]:
    """Returns budgets of no loaded model, and the list of those whose state is given up."""
    budgets = Budgets(PoolMemory(total_bytes), {}, lambda: 100.0)
    given_up: list[str] = []
    budgets.on_given_up = given_up.append
    for number, (model_id, state) in enumerate(states.items()):
        state.last_used = float(number)
        budgets.unloaded[model_id] = state
    return budgets, given_up


def test_all_is_kept_where_there_is_memory() -> None:
    first, second = state_of(conversations(4)), state_of(conversations(4))
    num_bytes = first.num_bytes + second.num_bytes
    budgets, given_up = budgets_of(num_bytes, first=first, second=second)
    asyncio.run(budgets.divide())
    assert budgets.taken_bytes == num_bytes == first.num_bytes + second.num_bytes > 0 and not given_up


def test_what_was_used_longest_ago_is_cut_down_first() -> None:
    first, second = state_of(conversations(8)), state_of(conversations(8))
    half, whole = first.num_bytes // 2, second.num_bytes
    budgets, given_up = budgets_of(half + whole, first=first, second=second)
    asyncio.run(budgets.divide())
    assert 0 < first.num_bytes <= half and second.num_bytes == whole and not given_up


def test_a_model_being_loaded_leaves_a_quarter_to_the_state_of_others(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    state = state_of(conversations(8))
    budgets, given_up = budgets_of(2 * state.num_bytes, a=state)
    budgets.joining = ModelUse("b", 100.0, is_in_use=True)
    whole = state.num_bytes
    asyncio.run(budgets.shrink(budgets.plan()))
    assert 0 < state.num_bytes <= whole // 2 and not given_up
    asyncio.run(budgets.shrink({"a": 0}))
    assert state.num_bytes == 0 and given_up == ["a"] and not budgets.unloaded
    assert "conversations of a are given up: other models or servers need the memory" in caplog.text


def test_state_given_up_for_other_programs_is_said_to_be(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    state = state_of(conversations(8))
    budgets, given_up = budgets_of(2 * state.num_bytes, a=state)
    budgets.relieve(Pressure.CRITICAL)
    assert state.num_bytes == 0 and given_up == ["a"]
    assert "conversations of a are given up: other programs need the memory" in caplog.text


def test_state_that_is_pinned_and_cannot_be_cut_down_goes_as_a_whole() -> None:
    prompts = conversations(8)
    state = state_of(prompts, pinned=prompts[0])
    state.shrink(state.num_bytes // 2)
    assert state.num_bytes > 0, "the pinned part fits"
    state.shrink(1)
    assert state.num_bytes == 0


def drafted(state: EngineState, namespace: str) -> list[int]:
    """What follows the beginning of `SAID`."""
    own = state.prefix_cache.history.begin(namespace)
    follower = HistoryFollower(state.prefix_cache.history, own)
    for token in SAID[:5].tolist():
        own.push(token)
        follower.push(token)
    return follower.next_tokens(2)


def test_a_session_is_forgotten_with_every_adapter_and_in_its_namespace_only() -> None:
    state = state_of([])
    for name in ("ours", "lora:1234:ours", "theirs"):
        state.prefix_cache.history.add(name, SAID, "s")
        state.record(name, "s", SAID)
    state.forget_client("ours", "another")
    assert drafted(state, "ours") == [5, 6]
    state.forget_client("ours", "s")
    assert [drafted(state, name) for name in ("ours", "lora:1234:ours", "theirs")] == [[], [], [5, 6]]
    assert [state.last(name, "s") is None for name in ("ours", "theirs")] == [True, False]
