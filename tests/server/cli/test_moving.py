"""`mlx-serve cache export` and `import`: of a running server, and of the folder without one."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cache import moving
from cache.disk import model_folders
from cache.disk.files import write_to
from server.app.config import ServerConfig
from server.cli import ask as ask_module
from server.cli.main import execute
from tests.server.api.admin.test_cache import serving
from tests.server.api.admin.test_moving import converse
from tests.support import disk_driver, tiny_models
from tests.support.disk_driver import find_span, open_tier, tokens_of, write

FINGERPRINT = "0123456789abcdef" * 2 + " mtp"
FIRST, OTHER = tokens_of(range(600)), tokens_of([5] * 300)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server answers."""
    monkeypatch.setattr(ask_module, "known_urls", lambda: ["http://127.0.0.1:9"])


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    folder = model_folders.place(tmp_path / "here", "qwen", FINGERPRINT)
    tier = open_tier(folder, fingerprint=FINGERPRINT)
    assert write(tier, FIRST) is not None and write(tier, OTHER, namespace="key") is not None and tier.flush(10)
    tier.close()
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = execute(["cache", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def kept(folder: Path) -> list[bool]:
    """Whether each text is on disk, as it should be."""
    tier = open_tier(folder, fingerprint=FINGERPRINT)
    try:
        disk_driver.assert_all_right(tier)
        return [find_span(tier, FIRST) is not None, find_span(tier, OTHER, namespace="key") is not None]
    finally:
        tier.close()


@pytest.mark.usefixtures("alone")
def test_without_a_server_folders_move(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, here, there = str(parent / "b.tar"), str(parent / "here"), str(parent / "there")
    status, out, _ = run(capsys, "export", "--all", file, "--cache-dir", here)
    assert status == 0 and "It holds prompts and answers" in out
    assert Path(file).stat().st_mode & 0o777 == 0o600
    assert run(capsys, "import", file, "--cache-dir", there)[0] == 0
    folder = parent / "there" / "qwen-0123456789abcdef"
    assert kept(folder) == [True, False]
    assert run(capsys, "import", file, "--cache-dir", there)[0] == 0, "twice is as good"
    everything = str(parent / "all.tar")
    assert run(capsys, "export", "--all", everything, "--cache-dir", here, "--namespace", "all")[0] == 0
    status, out, _ = run(capsys, "import", everything, "--cache-dir", there, "--namespace", "all", "--json")
    assert status == 0 and json.loads(out)["conversations"] == 2
    assert kept(folder) == [True, True]


@pytest.mark.usefixtures("alone")
def test_a_damaged_bundle_leaves_what_was_before_it(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, here, there = parent / "b.tar", str(parent / "here"), str(parent / "there")
    assert run(capsys, "export", "--all", str(file), "--cache-dir", here, "--namespace", "all")[0] == 0
    data = bytearray(file.read_bytes())
    data[-3000] ^= 1
    file.write_bytes(data)
    status, _, err = run(capsys, "import", str(file), "--cache-dir", there, "--namespace", "all")
    assert status == 1 and "damaged" in err and "kept before that: 1" in err
    assert sorted(kept(parent / "there" / "qwen-0123456789abcdef")) == [False, True]


@pytest.mark.usefixtures("alone")
def test_damage_on_disk_costs_what_lies_after_it_in_a_conversation(
    parent: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moving, "PIECE_BYTES", 1)  # pieces of 256 tokens
    file, here, there = str(parent / "b.tar"), parent / "here", str(parent / "there")
    largest = max(here.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) * 4 // 5] ^= 1
    largest.write_bytes(data)
    assert run(capsys, "export", "--all", file, "--cache-dir", str(here), "--namespace", "all")[0] == 0
    assert "stays here: the data are damaged" in caplog.text
    status, out, _ = run(capsys, "import", file, "--cache-dir", there, "--namespace", "all", "--json")
    assert (status, json.loads(out)["tokens"]) == (0, 256 + len(OTHER)), "the damage is in the second piece"
    assert kept(parent / "there" / "qwen-0123456789abcdef") == [False, True]


@pytest.mark.usefixtures("alone")
def test_names_of_a_bundle_lead_out_of_no_folder(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, there = parent / "b.tar", parent / "there"
    assert run(capsys, "export", "--all", str(file), "--cache-dir", str(parent / "here"))[0] == 0
    whole = file.read_bytes()
    for made_up in (b"../../../../etc/", b"0123456789abcde/"):
        file.write_bytes(whole.replace(b"0123456789abcdef", made_up, 1))
        status, _, err = run(capsys, "import", str(file), "--cache-dir", str(there))
        assert (status, "no bundle" in err) == (1, True)
    file.write_bytes(re.sub(rb'"model":"qwen"', b'"model":"../."', whole))
    run(capsys, "import", str(file), "--cache-dir", str(there))
    assert {path.name for path in parent.iterdir()} <= {"b.tar", "here", "there"}
    file.write_bytes(whole.replace(b" mtp", b" xyz"))
    assert run(capsys, "import", str(file), "--cache-dir", str(parent / "here"))[2].count("other weights") == 1


@pytest.mark.usefixtures("alone")
def test_wrong_arguments_are_named(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, file = str(parent / "here"), str(parent / "b.tar")
    assert run(capsys, "export", file)[0] == run(capsys, "export", "--all", "a", "b")[0] == 2
    assert "--all exports what --cache-disk keeps" in run(capsys, "export", "mine", file, "--cache-dir", here)[2]
    assert "name one with --model: none" in run(capsys, "export", "--all", file, "--cache-dir", str(parent / "x"))[2]
    nothing = run(capsys, "export", "--all", file, "--cache-dir", here, "--namespace", "nobody")
    assert "keeps nothing of this namespace" in nothing[2]
    assert "no server answers" in run(capsys, "import", __file__, "--url", "http://127.0.0.1:9")[2]
    assert "cannot be read" in run(capsys, "import", file)[2]
    assert not Path(file).exists() and not Path(f"{file}.part").exists()
    assert run(capsys, "export", "--all", file, "--cache-dir", here)[0] == 0
    assert "is there already" in run(capsys, "export", "--all", file, "--cache-dir", here)[2]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tiny_models.write("llama", tmp_path_factory.mktemp("models") / "tiny")
    with serving(ServerConfig(models=(str(folder),), cache_memory_bytes=1 << 26)) as client:
        yield client


def test_a_running_server_is_asked(server: httpx.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url, file = str(server.base_url), str(tmp_path / "b.tar")
    converse(server, "mine", 1)
    assert run(capsys, "export", "mine", file, "--url", url)[0] == 0
    status, out, _ = run(capsys, "import", file, "--url", url, "--namespace", "elsewhere")
    assert status == 0 and out.startswith("Taken in by tiny at http://") and "conversations: 1" in out
    status, out, _ = run(capsys, "import", file, "--url", url, "--namespace", "elsewhere")
    assert status == 0 and out.startswith("Nothing is new to tiny at http://") and "conversations: 1" in out
    assert "no state of the session 'x'" in run(capsys, "export", "x", f"{file}2", "--url", url)[2]
    assert list(tmp_path.iterdir()) == [Path(file)]
    assert "refuses: this is no bundle" in run(capsys, "import", __file__, "--url", url)[2]


def test_ctrl_c_says_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ask_module.AskedServer, "upload", stop)
    monkeypatch.setattr(ask_module.AskedServer, "download", stop)
    status, _, err = run(capsys, "import", __file__)
    assert status == 130 and "stopped; what was taken in so far is kept" in err
    status, _, err = run(capsys, "export", "--all", str(tmp_path / "b.tar"))
    assert status == 130 and "stopped; no file is left" in err and not list(tmp_path.iterdir())


def test_a_server_that_breaks_off_leaves_no_file(
    server: httpx.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    converse(server, "broken", 2)
    monkeypatch.setattr(moving, "PIECE_BYTES", 1)  # pieces of 256 tokens
    writes = iter([write_to])
    monkeypatch.setattr(moving, "write_to", lambda *given: next(writes)(*given))
    status, _, err = run(capsys, "export", "broken", str(tmp_path / "b.tar"), "--url", str(server.base_url))
    assert status == 1 and "broke off in the middle" in err
    assert not list(tmp_path.iterdir())
