"""What a person reads when a server has started, and before it has."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from models.precision import Precision
from models.store.library import create
from models.store.stored_model import Modelfile, WeightsPlace
from server.app.config import ServerConfig
from server.app.memory_budget import Claim, Machine, MemoryPlan
from server.app.service import Service, Wiring, find_float32_bytes, open_service, source_of
from server.cli.serve import Surroundings, _check_heals, facts, round_count, slowness
from tests.support.tiny_models import write

pytestmark = pytest.mark.alone("the report of several machines is another")
GB = 10**9
ALONE = Surroundings((), "libopenblas.so.0", ["http://127.0.0.1:8080"])


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    folder = write("qwen3", tmp_path_factory.mktemp("models") / "tiny")
    return open_service(ServerConfig(models=(str(folder),)))


def told(service: Service, around: Surroundings = ALONE, **settings: object) -> dict[str, str]:
    config = ServerConfig(**settings)  # type: ignore[arg-type]
    return dict(facts(service, config, around))


def test_a_model_that_sees_says_so(service: Service) -> None:
    assert "images" not in told(service)
    sees = replace(service.asked_for, vision=SimpleNamespace())  # type: ignore[arg-type]
    assert told(replace(service, asked_for=sees))["images"] == "seen"


def test_a_heal_of_no_model_is_told(caplog: pytest.LogCaptureFixture) -> None:
    _check_heals(ServerConfig(heals=("qwen3:*=git", "nosuch=git")), ["demo", "qwen3:8b"])
    assert caplog.messages == ["--heal nosuch=git heals nothing: no model here is called nosuch"]


def test_memory_is_shared_out_to_the_last_byte(service: Service) -> None:
    report = told(replace(service, memory=MemoryPlan(25 * GB, 3 * GB, 16 * GB, 0)))
    assert report["weights"] == "3.0 GB"
    assert report["cache"] == "16.0 GB (--cache-memory)"
    assert report["rest"] == "6.0 GB of 25.0 GB for everything else on this machine"


def test_memory_that_is_too_little_for_all_models_at_once_is_told(service: Service) -> None:
    hint = "not for all models at once: --cache-memory 135MB is"
    for num_bytes, models, is_told in ((10**8, ("a", "b"), True), (10**8, ("a",), False), (135 * 10**6, "ab", False)):
        config = ServerConfig(models=tuple(models), cache_memory_bytes=num_bytes)
        assert (("", hint) in facts(service, config, ALONE)) == is_told


def test_what_is_wired_is_told_on_a_mac(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not {"wired", "kernels"} & told(service).keys() and "rows" in told(service)
    monkeypatch.setattr("platform.mac_ver", lambda: ("15.1", ("", "", ""), "arm64"))
    wiring = Wiring(Machine(64 * GB, 48 * GB), is_wanted=True)
    wiring.wired_bytes = 5 * GB
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    report = told(replace(service, wiring=wiring))
    assert report["kernels"].startswith("of ")
    assert report["wired"] == "5.0 GB, which macOS does not page out (--no-wire-weights)"


def test_the_report_says_whether_answers_are_drafted(service: Service) -> None:
    assert told(service)["drafts"] == service.engine.stats().drafts_form
    assert told(service, speculate="off")["drafts"] == "off (--speculate)"


def test_a_model_has_the_name_and_limits_that_it_was_asked_for_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    create("writer", WeightsPlace("built-in", "demo"), Modelfile("demo", [("num_ctx", 64)]))
    service = open_service(ServerConfig(models=("writer",)))
    report = told(service)
    assert report["model"].startswith("writer, ") and report["context"] == "64 tokens"
    assert service.asked_for is service.opened.served(source_of("writer"))


def test_tokens_are_told_once_the_engine_has_measured_them(service: Service) -> None:
    service.engine.start()
    try:
        assert "tokens (--cache-memory)" in told(service)["cache"]
    finally:
        service.engine.stop()


def test_others_are_named_and_too_much_is_called_that(service: Service) -> None:
    crowded = replace(service, memory=MemoryPlan(25 * GB, 3 * GB, 16 * GB, 9 * GB))
    report = told(crowded, replace(ALONE, others=(Claim(7, "org/big", 9 * GB, ""),)))
    assert report["beside"] == "9.0 GB are claimed by org/big, process 7"
    starting = told(service, replace(ALONE, others=(Claim(7, "", 0, ""),)))
    assert starting["beside"] == "a server is starting, process 7"
    assert report["rest"].startswith("none: over the machine's 25.0 GB in all")


def test_a_budget_beside_others_is_told_with_what_it_may_become(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.app.service.read_machine", lambda info: Machine(32 * GB))
    monkeypatch.setattr("server.app.service._useful_bytes", lambda loaded, config: 6 * GB)
    folder = write("qwen3", tmp_path / "tiny")
    others = (Claim(7, "org/big", 22 * GB, "", 15 * GB, 5 * GB),)
    service = open_service(ServerConfig(models=(str(folder),)), others)
    # Both need more than half of the 9 GB that weights leave of three quarters.
    assert told(service)["cache"] == "2.0 GB; up to 4.5 GB as others make way (--cache-memory)"
    # Weights in float32 have half of what the other does not need.
    monkeypatch.setattr("server.app.service._is_on_gpu", lambda: False)
    assert find_float32_bytes(Machine(32 * GB), others) == 2 * GB


@pytest.mark.parametrize("fast_blas", ["libopenblas.so.0", None])
def test_the_blas_is_named_or_how_to_get_one(
    fast_blas: str | None, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    on_cpu = replace(service, seconds_per_token=0.1)
    assert told(on_cpu, replace(ALONE, fast_blas=fast_blas))["blas"] == (
        fast_blas or "MLX's own, slow with long prompts; apt install libopenblas0-pthread"
    )
    assert "blas" not in told(replace(service, seconds_per_token=None))


def test_a_disk_with_less_room_than_it_may_take_is_told(service: Service, tmp_path: Path) -> None:
    def lines(num_bytes: int, folder: Path) -> list[str]:
        config = ServerConfig(cache_disk_bytes=num_bytes, cache_dir=str(folder))
        return [text for _, text in facts(service, config, ALONE)]

    free_bytes = shutil.disk_usage(tmp_path).free
    assert any(line.startswith("of which the disk has room for ") for line in lines(2 * free_bytes, tmp_path))
    assert not any("has room" in line for line in lines(free_bytes // 2, tmp_path))
    assert not any("has room" in line for line in lines(2 * free_bytes, tmp_path / "missing"))


def test_weights_that_are_not_held_as_stored_say_so(service: Service) -> None:
    plan = MemoryPlan(25 * GB, 3 * GB, 16 * GB, 0)
    loaded = replace(service.loaded, precision=Precision.FLOAT32)
    model = replace(service.model, facts=replace(service.model.facts, stored_bytes=423_000_000))
    converted = replace(service, loaded=loaded, memory=plan, opened=replace(service.opened, model=model))
    assert told(converted)["weights"] == "3.0 GB, as float32: fastest on this CPU (423.0 MB on disk)"


@pytest.mark.parametrize(
    ("seconds", "precision", "words"),
    [
        (None, Precision.STORED, None),
        (0.1, Precision.STORED, None),
        (6.1, Precision.STORED, "Expect about 6.1 s per token"),
        (0.6, Precision.FLOAT32_SCALES, "with memory for float32 weights"),
    ],
)
def test_a_slow_model_is_told(
    seconds: float | None, precision: Precision, words: str | None, service: Service
) -> None:
    loaded = replace(service.loaded, precision=precision)
    found = slowness(replace(service, loaded=loaded, seconds_per_token=seconds))
    assert found is None if words is None else words in str(found)


def test_lines_fit_a_terminal(service: Service) -> None:
    around = Surroundings((Claim(123_456, "qwen3:4b", 9 * GB, ""),), None, ["http://127.0.0.1:8080"] * 2)
    slow = replace(service, seconds_per_token=9.0, memory=MemoryPlan(25 * GB, 3 * GB, 16 * GB, 9 * GB))
    config = ServerConfig(insecure_no_key=True, cache_disk_bytes=20 * GB)
    assert [text for _, text in facts(slow, config, around) if len(text) > 70] == []


@pytest.mark.parametrize(
    ("number", "text"), [(7.9, "7"), (1234, "1 200"), (137_900, "137 000"), (4_120_000, "4.1 million")]
)
def test_estimates_have_the_digits_that_mean_something(number: float, text: str) -> None:
    assert round_count(number) == text
