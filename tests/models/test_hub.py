"""Downloads with the real client, from a tiny hub on loopback; each in a process of its own, as a person runs it."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.fake_hub import COMMIT, FakeHub, running_hub

WEIGHTS = b"weights " * 3_000_000
"""24 MB: downloads are written in pieces of 1 MiB, and only whole pieces survive an interruption."""
MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}",
    "tokenizer.model": b"sp",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"# read me",
    "modeling.py": b"raise SystemExit('code of a repository was run')",
    "model.gguf": b"other format",
    "original/model.safetensors": b"other layout",
}
NEEDED = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer.model", "chat_template.jinja"}

PULL = "from server.cli.main import main; main()"
DEADLINE_SECONDS = 120.0
LITTLE_DISK = "import shutil; shutil.disk_usage = lambda path: type('Usage', (), {'free': 20_000_000}); "


@dataclass
class Result:
    status: int
    output: str
    errors: str


class Person:
    """Someone with an empty cache who types `mlx-serve pull …`."""

    def __init__(self, home: Path, endpoint: str) -> None:
        self.home = home
        self.environment = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, "COLUMNS": "200"}
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, before: str = "") -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", before + PULL, *arguments]
        process = subprocess.Popen(
            command, env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._started.append(process)
        return process

    def starts_to_fetch(self, *arguments: str) -> "subprocess.Popen[str]":
        """Starts a pull and returns when a first piece of it is on the disk."""
        process = self.start(*arguments)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not any(part.stat().st_size for part in self.parts()):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "nothing was fetched"
            time.sleep(0.02)
        return process

    def types(self, *arguments: str, before: str = "") -> Result:
        process = self.start(*arguments, before=before)
        output, errors = process.communicate(timeout=DEADLINE_SECONDS)
        return Result(process.returncode, output, errors)

    def snapshot(self, repository: str) -> Path:
        return self.home / "hub" / f"models--{repository.replace('/', '--')}" / "snapshots" / COMMIT

    def parts(self) -> list[Path]:
        return list(self.home.glob("hub/*/blobs/*.part"))

    def leave(self) -> None:
        """Ends what a test that failed has left running."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate()


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with running_hub() as hub:
        hub.repositories["org/model"] = dict(MODEL)
        yield hub


@pytest.fixture
def person(tmp_path: Path, hub: FakeHub) -> Iterator[Person]:
    person = Person(tmp_path / "home", hub.url)
    yield person
    person.leave()


def says_one_sentence(result: Result, *words: str) -> None:
    assert result.status == 1, result
    lines = result.errors.strip().splitlines()
    assert len(lines) == 1, result.errors
    assert lines[0].startswith("mlx-serve: ")
    for word in words:
        assert word in lines[0]


def test_pull_fetches_what_mlx_needs_and_nothing_else(hub: FakeHub, person: Person) -> None:
    result = person.types("pull", "org/model")
    assert (result.status, result.errors) == (0, "")
    assert "mlx-serve run org/model" in result.output
    snapshot = person.snapshot("org/model")
    assert {file.name for file in snapshot.iterdir()} == NEEDED
    assert (snapshot / "model.safetensors").read_bytes() == WEIGHTS
    fetched = {path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path}
    assert {path.rsplit("/", 1)[1] for path in fetched} == NEEDED
    assert person.parts() == []


def test_a_pulled_model_is_listed_and_pulled_no_second_time(hub: FakeHub, person: Person) -> None:
    person.types("pull", "org/model@main")
    hub.requests.clear()
    assert person.types("pull", "org/model").status == 0
    assert not [path for _, path, _ in hub.requests if "/resolve/" in path]
    listed = person.types("list").output
    assert "org/model" in listed
    assert "llama" in listed
    assert "24.0 MB" in listed


def test_the_script_does_the_same(hub: FakeHub, person: Person) -> None:
    script = Path(__file__).parents[2] / "scripts" / "pull_model.py"
    command = [sys.executable, str(script), "org/model"]
    run = subprocess.run(command, env=person.environment, timeout=DEADLINE_SECONDS, check=False)
    assert run.returncode == 0
    assert (person.snapshot("org/model") / "model.safetensors").exists()


def test_a_cut_connection_is_continued_where_it_was_cut(hub: FakeHub, person: Person) -> None:
    hub.cut_after_bytes = 22_000_000
    assert person.types("pull", "org/model").status == 0
    assert hub.ranges_of("model.safetensors") == [None, "bytes=20971520-"]


def test_what_is_complete_but_not_in_its_place_is_fetched_no_second_time(hub: FakeHub, person: Person) -> None:
    """As when the process was killed between the last byte and the check."""
    part = person.snapshot("org/model").parent.parent / "blobs" / f"{hashlib.sha256(WEIGHTS).hexdigest()}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(WEIGHTS)
    assert person.types("pull", "org/model").status == 0
    assert hub.ranges_of("model.safetensors") == []
    assert person.parts() == []


def test_a_hub_that_sends_everything_again_does_no_harm(hub: FakeHub, person: Person) -> None:
    hub.honours_ranges = False
    hub.cut_after_bytes = 5_000_000
    process = person.start("pull", "org/model")
    deadline = time.monotonic() + DEADLINE_SECONDS
    while len(hub.ranges_of("model.safetensors")) < 2:
        assert time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    hub.cut_after_bytes = None
    assert process.wait(DEADLINE_SECONDS) == 0
    assert (person.snapshot("org/model") / "model.safetensors").read_bytes() == WEIGHTS


def test_a_hub_that_sends_nothing_more_is_given_up(hub: FakeHub, person: Person) -> None:
    hub.cut_after_bytes = 0
    without_pauses = "import models.hub; models.hub._PAUSE_SECONDS = 0; "
    says_one_sentence(person.types("pull", "org/model", before=without_pauses), "cannot be reached")


def test_the_token_goes_to_the_hub_and_not_where_it_redirects_to(hub: FakeHub, person: Person) -> None:
    person.environment["HF_TOKEN"] = "hf_secret"
    with running_hub() as other:
        other.repositories = hub.repositories
        hub.weights_are_at = other.url.replace("127.0.0.1", "localhost")
        assert person.types("pull", "org/model").status == 0
        assert other.ranges_of("model.safetensors") == [None]
        assert set(other.tokens) == {None}
    assert set(hub.tokens) == {"Bearer hf_secret"}


def test_ctrl_c_keeps_what_was_fetched_and_the_next_pull_continues(hub: FakeHub, person: Person) -> None:
    hub.pause_after_bytes = 22_000_000
    process = person.starts_to_fetch("pull", "org/model")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=DEADLINE_SECONDS)
    says_one_sentence(Result(process.returncode, "", errors), "mlx-serve pull org/model")
    num_kept = person.parts()[0].stat().st_size
    assert 0 < num_kept < len(WEIGHTS) and num_kept % 2**20 == 0

    hub.resume.set()
    hub.pause_after_bytes = None
    assert person.types("pull", "org/model").status == 0
    assert hub.ranges_of("model.safetensors")[-1] == f"bytes={num_kept}-"
    assert (person.snapshot("org/model") / "model.safetensors").read_bytes() == WEIGHTS


def test_damaged_leftovers_are_noticed_and_removed(hub: FakeHub, person: Person) -> None:
    hub.pause_after_bytes = 22_000_000
    process = person.starts_to_fetch("pull", "org/model")
    process.kill()
    process.communicate()
    hub.resume.set()
    hub.pause_after_bytes = None
    part = person.parts()[0]
    part.write_bytes(b"?" * part.stat().st_size)
    says_one_sentence(person.types("pull", "org/model"), "damaged", "pull it again")
    assert person.parts() == []
    assert person.types("pull", "org/model").status == 0


def test_no_network(person: Person) -> None:
    person.environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    says_one_sentence(person.types("pull", "org/model"), "cannot be reached")


def test_offline_by_choice(person: Person) -> None:
    person.environment["HF_HUB_OFFLINE"] = "1"
    says_one_sentence(person.types("pull", "org/model"), "HF_HUB_OFFLINE")


def test_no_such_repository(person: Person) -> None:
    says_one_sentence(person.types("pull", "org/modle"), "no repository org/modle")


def test_no_such_revision(person: Person) -> None:
    says_one_sentence(person.types("pull", "org/model@v9"), "org/model has no revision 'v9'")


def test_gated(hub: FakeHub, person: Person) -> None:
    hub.gated.add("org/model")
    says_one_sentence(person.types("pull", "org/model"), "consent", "HF_TOKEN")


def test_a_full_disk_is_noticed_before_anything_is_fetched(hub: FakeHub, person: Person) -> None:
    says_one_sentence(person.types("pull", "org/model", before=LITTLE_DISK), "needs 0.0 GB", "0.0 GB left")
    assert not [path for _, path, _ in hub.requests if "/resolve/" in path]


def test_what_is_here_already_needs_no_disk(hub: FakeHub, person: Person) -> None:
    person.types("pull", "org/model")
    (person.snapshot("org/model") / "tokenizer.json").unlink()
    assert person.types("pull", "org/model", before=LITTLE_DISK).status == 0


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_repository_without_mlx_weights_is_refused(missing: str, hub: FakeHub, person: Person) -> None:
    del hub.repositories["org/model"][missing]
    says_one_sentence(person.types("pull", "org/model"), "no weights that MLX can load")
    assert not [path for _, path, _ in hub.requests if "/resolve/" in path]


def test_two_pulls_of_one_model_do_not_write_into_one_file(hub: FakeHub, person: Person) -> None:
    hub.pause_after_bytes = 22_000_000
    first = person.starts_to_fetch("pull", "org/model")
    says_one_sentence(person.types("pull", "org/model"), "being downloaded by another process")
    hub.resume.set()
    first.communicate(timeout=DEADLINE_SECONDS)
    assert first.returncode == 0
    assert (person.snapshot("org/model") / "model.safetensors").read_bytes() == WEIGHTS


def test_a_cache_that_cannot_be_written(person: Person) -> None:
    person.home.parent.mkdir(exist_ok=True)
    person.home.write_text("a file where the folder should be")
    says_one_sentence(person.types("pull", "org/model"), "could not be stored")


def test_no_repository_name(person: Person) -> None:
    says_one_sentence(person.types("pull", "some model"), "no repository", "org/name")
