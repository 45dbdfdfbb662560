"""Downloads with the real client, from a tiny hub on loopback.

What can be seen only of a process (what is cut off, its keyboard, two at once, its environment) runs in one, as a
person starts it; what is refused before anything is fetched is said in this process, which costs no start.
"""

import contextlib
import hashlib
import io
import json
import logging
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import mlx.core as mx
import pytest
from huggingface_hub import close_session, constants
from huggingface_hub.errors import HfHubHTTPError

from models import hub as hub_module
from models import loader
from server.cli.main import execute
from tests.support import tiny_models, tiny_mtp
from tests.support.fake_hub import COMMIT, FakeHub, running_hub
from tests.support.forked import COMMANDS, MLX_SERVE, start

WEIGHTS = b"weights " * 1_500_000
"""12 MB: downloads are written in pieces of 1 MiB, and only whole pieces survive an interruption."""
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

DEADLINE_SECONDS = 300.0
WITHOUT_PAUSES = "import models.hub; models.hub._PAUSE_SECONDS = 0; "
WITHOUT_VLM = (
    "from importlib.metadata import version; from models import providers; "
    "providers.version = lambda name: version('a-distribution-of-nobody'); "
)
LITTLE_DISK = "import shutil; shutil.disk_usage = lambda path: type('Usage', (), {'free': 10_000_000}); "


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

    def start(self, *arguments: str, before: str = "", fresh: bool = False) -> "subprocess.Popen[str]":
        process = start(
            *arguments, code=before + MLX_SERVE, imported=COMMANDS, fresh=fresh, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._started.append(process)
        return process

    def starts_to_fetch(self, *arguments: str) -> "subprocess.Popen[str]":
        """Starts a pull and returns when a first piece of it is on the disk."""
        process = self.start(*arguments)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not any(part.stat().st_size for part in self.parts()):
            assert process.poll() is None, process.communicate(timeout=DEADLINE_SECONDS)
            assert time.monotonic() < deadline, "nothing was fetched"
            time.sleep(0.02)
        return process

    def types(self, *arguments: str, **options: Any) -> Result:
        process = self.start(*arguments, **options)
        output, errors = process.communicate(timeout=DEADLINE_SECONDS)
        return Result(process.returncode, output, errors)

    def is_told(self, *arguments: str) -> Result:
        """The same in this process, which the client's settings are taken from `environment` for."""
        places = {
            "ENDPOINT": self.environment["HF_ENDPOINT"],
            "HUGGINGFACE_CO_URL_TEMPLATE": self.environment["HF_ENDPOINT"]
            + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(self.home / "hub"),
            "HF_HUB_OFFLINE": "HF_HUB_OFFLINE" in self.environment,
        }
        output, errors, logger = io.StringIO(), io.StringIO(), logging.getLogger("huggingface_hub")
        level = logger.level
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
            for name, value in places.items():
                patch.setattr(constants, name, value)
            try:
                status = execute(arguments)
            finally:
                logger.setLevel(level)
                close_session()
        return Result(status, output.getvalue(), errors.getvalue())

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


def says_one_sentence(result: Result, *words: str, status: int = 1) -> None:
    assert result.status == status, result
    lines = result.errors.strip().splitlines()
    assert len(lines) == 1, result.errors
    assert lines[0].startswith("mlx-serve: ")
    for word in words:
        assert word in lines[0]


def test_pull_fetches_what_mlx_needs_and_nothing_else(hub: FakeHub, person: Person) -> None:
    hub.repositories["org/model"]["mtp.safetensors"] = b"a module that drafts"
    result = person.types("pull", "org/model", fresh=True)
    assert (result.status, result.errors) == (0, "")
    assert "mlx-serve run org/model" in result.output
    snapshot = person.snapshot("org/model")
    assert {file.name for file in snapshot.iterdir()} == NEEDED | {"mtp.safetensors"}
    assert (snapshot / "model.safetensors").read_bytes() == WEIGHTS
    fetched = {path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path}
    assert {path.rsplit("/", 1)[1] for path in fetched} == NEEDED | {"mtp.safetensors"}
    assert person.parts() == []


def test_a_pulled_model_is_listed_and_pulled_no_second_time(hub: FakeHub, person: Person) -> None:
    person.is_told("pull", "org/model@main")
    hub.requests.clear()
    assert person.is_told("pull", "org/model").status == 0
    assert not [path for _, path, _ in hub.requests if "/resolve/" in path]
    listed = person.is_told("list").output
    assert all(words in listed for words in ("org/model", "llama", "12.0 MB"))


def test_a_cut_connection_is_continued_where_it_was_cut(hub: FakeHub, person: Person) -> None:
    hub.cut_after_bytes = 11_000_000
    assert person.types("pull", "org/model", before=WITHOUT_PAUSES).status == 0
    assert hub.ranges_of("model.safetensors") == [None, "bytes=10485760-"]


def test_what_is_complete_but_not_in_its_place_is_fetched_no_second_time(hub: FakeHub, person: Person) -> None:
    """As when the process was killed between the last byte and the check."""
    part = person.snapshot("org/model").parent.parent / "blobs" / f"{hashlib.sha256(WEIGHTS).hexdigest()}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(WEIGHTS)
    assert person.is_told("pull", "org/model").status == 0
    assert hub.ranges_of("model.safetensors") == []
    assert person.parts() == []


def test_a_hub_that_sends_everything_again_does_no_harm(hub: FakeHub, person: Person) -> None:
    hub.honours_ranges = False
    hub.cut_after_bytes = 5_000_000
    process = person.start("pull", "org/model", before=WITHOUT_PAUSES)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while len(hub.ranges_of("model.safetensors")) < 2:
        assert time.monotonic() < deadline, "the download was not begun again"
        time.sleep(0.02)
    hub.cut_after_bytes = None
    assert process.wait(DEADLINE_SECONDS) == 0
    assert (person.snapshot("org/model") / "model.safetensors").read_bytes() == WEIGHTS


def test_a_hub_that_sends_nothing_more_is_given_up(hub: FakeHub, person: Person) -> None:
    hub.cut_after_bytes = 0
    says_one_sentence(person.types("pull", "org/model", before=WITHOUT_PAUSES), "cannot be reached")


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
    hub.pause_after_bytes = 11_000_000
    process = person.starts_to_fetch("pull", "org/model")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=DEADLINE_SECONDS)
    says_one_sentence(Result(process.returncode, "", errors), "mlx-serve pull org/model", status=130)
    num_kept = person.parts()[0].stat().st_size
    assert 0 < num_kept < len(WEIGHTS) and num_kept % 2**20 == 0

    hub.resume.set()
    hub.pause_after_bytes = None
    assert person.types("pull", "org/model").status == 0
    assert hub.ranges_of("model.safetensors")[-1] == f"bytes={num_kept}-"
    assert (person.snapshot("org/model") / "model.safetensors").read_bytes() == WEIGHTS


def test_damaged_leftovers_are_noticed_and_removed(hub: FakeHub, person: Person) -> None:
    hub.pause_after_bytes = 11_000_000
    process = person.starts_to_fetch("pull", "org/model")
    process.kill()
    process.communicate()
    hub.resume.set()
    hub.pause_after_bytes = None
    part = person.parts()[0]
    part.write_bytes(b"?" * part.stat().st_size)
    says_one_sentence(person.is_told("pull", "org/model"), "damaged", "pull it again")
    assert person.parts() == []
    assert person.is_told("pull", "org/model").status == 0


def test_what_cannot_be_asked_for_is_refused_in_words(person: Person) -> None:
    for name, words in (
        ("org/modle", "no repository org/modle"),
        ("org/model@v9", "org/model has no revision 'v9'"),
        ("some model", "is no repository org/name"),
    ):
        says_one_sentence(person.is_told("pull", name), words)
    person.environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    says_one_sentence(person.is_told("pull", "org/model"), "cannot be reached")
    person.environment["HF_HUB_OFFLINE"] = "1"
    says_one_sentence(person.is_told("pull", "org/model"), "HF_HUB_OFFLINE")


def test_gated(hub: FakeHub, person: Person) -> None:
    hub.gated.add("org/model")
    says_one_sentence(person.is_told("pull", "org/model"), "consent", f"{hub.url}/org/model,", "HF_TOKEN")


def test_a_full_disk_is_noticed_before_anything_is_fetched(hub: FakeHub, person: Person) -> None:
    says_one_sentence(person.types("pull", "org/model", before=LITTLE_DISK), "needs 12.0 MB more", "has 10.0 MB left")
    assert not [path for _, path, _ in hub.requests if "/resolve/" in path]


def test_what_is_here_already_needs_no_disk(hub: FakeHub, person: Person) -> None:
    person.is_told("pull", "org/model")
    (person.snapshot("org/model") / "tokenizer.json").unlink()
    assert person.types("pull", "org/model", before=LITTLE_DISK).status == 0


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_repository_without_mlx_weights_is_refused(missing: str, hub: FakeHub, person: Person) -> None:
    del hub.repositories["org/model"][missing]
    says_one_sentence(
        person.is_told("pull", "org/model"), "no weights that MLX can load", "a GGUF file is there", "convert"
    )
    assert not [path for _, path, _ in hub.requests if "/resolve/" in path]


def test_two_pulls_of_one_model_do_not_write_into_one_file(hub: FakeHub, person: Person) -> None:
    hub.pause_after_bytes = 11_000_000
    first = person.starts_to_fetch("pull", "org/model")
    says_one_sentence(person.is_told("pull", "org/model"), "being downloaded by another process")
    hub.resume.set()
    first.communicate(timeout=DEADLINE_SECONDS)
    assert first.returncode == 0
    assert (person.snapshot("org/model") / "model.safetensors").read_bytes() == WEIGHTS


def test_a_cache_that_cannot_be_written(person: Person) -> None:
    person.home.parent.mkdir(exist_ok=True)
    person.home.write_text("a file where the folder should be")
    says_one_sentence(person.is_told("pull", "org/model"), "could not be stored")


LITTLE_MEMORY = (
    "import server.cli.pull as p; from server.app.memory_budget import Machine as M; p.this_machine = lambda: M({}); "
)
QWEN = "mlx-community/Qwen3-{}-4bit"


def test_a_family_is_the_largest_of_its_models_that_fits(hub: FakeHub, person: Person) -> None:
    for size in ("0.6B", "1.7B", "4B"):
        hub.repositories[QWEN.format(size)] = dict(MODEL)
    result = person.types("pull", "qwen3", before=LITTLE_MEMORY.format(2 * 10**9))
    assert result.status == 0, result
    assert result.output.startswith("qwen3:1.7b (about 1.0 GB) is the largest of its family that fits here.\n")
    assert "Try it: mlx-serve run qwen3:1.7b" in result.output
    refused = person.types("pull", "qwen3:latest", before=LITTLE_MEMORY.format(10**8))
    says_one_sentence(refused, "The smallest of qwen3:latest, qwen3:0.6b, takes about 357.8 MB")


def test_what_the_machine_has_no_memory_for_is_only_fetched_by_force(hub: FakeHub, person: Person) -> None:
    little = LITTLE_MEMORY.format(3 * 10**8)
    words = "needs 12.0 MB of memory for weights, and this machine has 1.6 MB left"
    says_one_sentence(person.types("pull", "org/model", before=little), words)
    assert not [path for _, path, _ in hub.requests if "/resolve/" in path]
    assert person.types("pull", "--force", "org/model", before=little).status == 0


def test_programs_are_told_each_step(hub: FakeHub, person: Person) -> None:
    hub.repositories["org/model"]["model-2.safetensors"] = WEIGHTS[::-1]
    result = person.types("pull", "--json", "org/model")
    steps = [json.loads(line) for line in result.output.splitlines()]
    assert (
        steps[0]["status"] == "planned"
        and {"name": "model-2.safetensors", "bytes": len(WEIGHTS)} in steps[0]["files"]
    )
    downloads = [step for step in steps if step["status"] == "downloading"]
    assert downloads[-1]["completed"] == downloads[-1]["total"] > 2 * len(WEIGHTS)
    assert [step["file"] for step in steps if step["status"] == "checking"] == [
        "model.safetensors",
        "model-2.safetensors",
    ]
    assert steps[-1]["status"] == "success" and Path(steps[-1]["path"]).is_dir()


def test_what_a_model_needs_is_said_before_its_download(hub: FakeHub, person: Person) -> None:
    hub.repositories["org/model"]["config.json"] = b'{"model_type": "step3p7"}'
    said = "type 'step3p7' are not known to mlx-lm; mlx-vlm has it: pip install --no-deps mlx-vlm==0.7.10"
    for options in ((), ("--json",)):
        told = person.types("pull", *options, "org/model", before=WITHOUT_VLM).output.splitlines()
        assert said in told[0], told


def test_without_a_terminal_there_are_a_few_lines(hub: FakeHub, person: Person) -> None:
    lines = person.is_told("pull", "org/model").output.splitlines()
    told = [line for line in lines if line.startswith("org/model: ")]
    assert 5 <= len(told) <= 11 and told[-1].endswith(" of 12.0 MB"), lines


def test_a_busy_hub_is_asked_again(hub: FakeHub, person: Person) -> None:
    hub.busy_answers = 3
    assert person.is_told("pull", "org/model").status == 0
    hub.status = 503
    says_one_sentence(person.is_told("pull", "org/other"), "answered with status 503; try again later")


@pytest.mark.parametrize(
    ("asked", "seconds"), [("7", 7), ("86400", 60), ("Fri, 27 Nov 2026 07:28:00 GMT", 1), ("", 1)]
)
def test_a_busy_hub_has_nobody_wait_for_longer_than_a_minute(asked: str, seconds: float) -> None:
    request = httpx2.Request("GET", "http://hub.test")
    answer = httpx2.Response(503, headers={"Retry-After": asked}, request=request)
    assert hub_module._pause_after(HfHubHTTPError("busy", response=answer)) == seconds


@pytest.mark.parametrize(("status", "words"), [(429, "asked too often"), (403, "does not take the token")])
def test_a_hub_that_refuses(status: int, words: str, hub: FakeHub, person: Person) -> None:
    hub.status = status
    says_one_sentence(person.is_told("pull", "org/model"), words)


def test_a_proxy_that_is_not_there_is_named(person: Person) -> None:
    person.environment |= {"HF_ENDPOINT": "https://hub.test", "HTTPS_PROXY": "http://me:secret@127.0.0.1:9"}
    result = person.types("pull", "org/model")
    says_one_sentence(result, "through the proxy of HTTPS_PROXY, 127.0.0.1:9")
    assert "secret" not in result.errors


class Keyboard:
    """A terminal at which somebody types `mlx-serve run …`."""

    def __init__(self, person: Person, *arguments: str) -> None:
        self._screen, inside = os.openpty()
        files: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), inside)
        self.process = start(*arguments, imported=COMMANDS, env=person.environment, **files)
        os.close(inside)
        self.shown = ""

    def sees(self, words: str) -> None:
        """Reads until the words are shown."""
        while words not in self.shown:
            self.shown += self._next()

    def types(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def ends(self) -> int:
        """Reads to the end; returns the exit status."""
        with contextlib.suppress(OSError):  # Linux's word for the end of a terminal
            while piece := self._next():
                self.shown += piece
        return self.process.wait(DEADLINE_SECONDS)

    def _next(self) -> str:
        assert select.select([self._screen], [], [], DEADLINE_SECONDS)[0], f"nothing more was shown: {self.shown}"
        return os.read(self._screen, 4096).decode(errors="replace")


@pytest.mark.parametrize("answer", ["y", "", "n"])
def test_a_chat_with_a_model_that_is_not_here_offers_to_pull_it(answer: str, hub: FakeHub, person: Person) -> None:
    hub.repositories[QWEN.format("0.6B")] = dict(MODEL)
    keyboard = Keyboard(person, "run", "qwen3:0.6b", "Hello?", "--local")
    keyboard.sees("qwen3:0.6b is not on this machine. Pull it (about 357.8 MB; fits this machine)? [Y/n]")
    keyboard.types(f"{answer}\n")
    assert keyboard.ends() == 1
    if answer == "n":
        assert "download it: mlx-serve pull qwen3:0.6b" in keyboard.shown
        assert not [path for _, path, _ in hub.requests if "/resolve/" in path]
    else:
        # It is no model that could answer; that it was loaded is told by what is wrong with it.
        assert "qwen3:0.6b is here: " in keyboard.shown and "model.safetensors is damaged" in keyboard.shown


def test_weights_that_were_cut_off_are_fetched_again(hub: FakeHub, person: Person) -> None:
    assert person.is_told("pull", "org/model").status == 0
    weights = person.snapshot("org/model") / "model.safetensors"
    with weights.resolve().open("r+b") as blob:
        blob.truncate(1000)
    assert person.is_told("pull", "org/model").status == 0
    assert weights.read_bytes() == WEIGHTS


# -------------------------------------------------------------------------------------------------------- MTP modules

DRAFTING, MODULE = "mlx-community/Tiny-MLX-4bit", "mlx-community/Tiny-MTP-4bit"


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """A model that declares a module and has none, and the module's repository."""
    folder = tmp_path_factory.mktemp("drafting")
    model = files_of(tiny_models.write("qwen3_5", folder / "model"))
    config = json.loads(model["config.json"])
    config["text_config"]["mtp_num_hidden_layers"] = 1
    tensors = tiny_mtp.tensors_of(tiny_mtp.module_of("qwen3_5"), "qwen3_5")
    bare = {name.removeprefix("mtp."): array for name, array in tensors.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), bare)
    module = {"config.json": b'{"model_type": "qwen3_5_mtp"}', **files_of(folder)}
    return {DRAFTING: {**model, "config.json": json.dumps(config).encode()}, MODULE: module}


@pytest.fixture
def drafter(hub: FakeHub, drafting: dict[str, dict[str, bytes]]) -> FakeHub:
    hub.repositories |= {name: dict(files) for name, files in drafting.items()}
    return hub


def saved(person: Person, tensors: dict[str, mx.array]) -> bytes:
    file = person.home.with_suffix(".safetensors")
    mx.save_safetensors(str(file), tensors)
    return file.read_bytes()


def blobs_of(person: Person) -> set[str]:
    return {file.name for file in (person.snapshot(DRAFTING).parent.parent / "blobs").iterdir()}


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_a_module_is_offered_pulled_counted_and_removed(bits: str, drafter: FakeHub, person: Person) -> None:
    name = DRAFTING.replace("4bit", bits)
    drafter.repositories[name] = drafter.repositories[DRAFTING]
    command = f"pull {name} --mtp {MODULE}"
    assert f"mlx-serve {command}\n" in person.is_told("pull", name).output
    snapshot = person.snapshot(name)
    alone = sum(file.stat().st_size for file in snapshot.iterdir())
    result = person.is_told(*command.split())
    assert (result.status, result.errors) == (0, "")
    module = drafter.repositories[MODULE]["model.safetensors"]
    assert (snapshot / "mtp.safetensors").read_bytes() == module
    assert (snapshot / "mtp.safetensors").resolve().parent == snapshot.parent.parent.resolve() / "blobs"
    listed = {model["name"]: model for model in json.loads(person.is_told("list", "--json").output)}
    assert listed[name]["size_bytes"] == alone + len(module)
    assert MODULE not in listed
    assert "mtp.safetensors" in person.is_told("show", name).output
    assert "mtp.safetensors" not in person.is_told("verify", name).output
    assert loader.load(snapshot, name, with_mtp=True).mtp is not None
    assert "--mtp" not in person.is_told("pull", name).output
    person.is_told("rm", "--force", name)
    assert not snapshot.parent.parent.exists()


@pytest.mark.parametrize("case", ["undeclared", "held", "beside", "unknown", "unnamed", "refused"])
def test_no_module_is_offered_where_none_is_needed_or_known(case: str, drafter: FakeHub, person: Person) -> None:
    name, files = DRAFTING, drafter.repositories[DRAFTING]
    if case == "undeclared":
        files["config.json"] = drafter.repositories["org/model"]["config.json"]
    if case == "held":
        files["model-2.safetensors"] = saved(person, {"language_model.mtp.fc.weight": mx.zeros(1)})
    if case == "beside":
        files["mtp.safetensors"] = drafter.repositories[MODULE]["model.safetensors"]
    if case == "unknown":
        del drafter.repositories[MODULE]
    if case == "unnamed":
        name = "org/tiny"
        drafter.repositories[name] = files
    if case == "refused":
        drafter.unavailable.add(MODULE)
    result = person.is_told("pull", name)
    assert (result.status, result.errors, "--mtp" in result.output) == (0, "", False)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("mlx-community/Tiny-MTP-5bit", "no repository mlx-community/Tiny-MTP-5bit"),
        ("some module", "is no repository org/name"),
        ("org/two", "holds 2 files of weights; an MTP module is a single one"),
        ("org/gguf", "holds 0 files of weights; an MTP module is a single one; a GGUF file is there"),
        ("org/model", "is no MTP module: 12.0 MB is more than the model takes"),
        ("org/half", "holds no MTP module for this model: mlx-community/Tiny-MLX-4bit: the tensors of its MTP"),
        ("org/damaged", "is damaged"),
    ],
)
def test_a_wrong_repository_leaves_the_model_as_it_was(
    source: str, words: str, drafter: FakeHub, person: Person
) -> None:
    module = drafter.repositories[MODULE]["model.safetensors"]
    drafter.repositories |= {
        "org/two": {"model-1.safetensors": module, "model-2.safetensors": module},
        "org/gguf": {"module.gguf": module},
        "org/half": {"model.safetensors": saved(person, {"fc.weight": mx.zeros((64, 128))})},
        "org/damaged": {"model.safetensors": b"<html>" + bytes(90)},
    }
    person.is_told("pull", DRAFTING, "--mtp", MODULE)
    files, blobs = files_of(person.snapshot(DRAFTING)), blobs_of(person)
    says_one_sentence(person.is_told("pull", DRAFTING, "--mtp", source), words)
    assert (files_of(person.snapshot(DRAFTING)), blobs_of(person)) == (files, blobs)


@pytest.mark.parametrize("source", ["org/nowhere", "nowhere"])
def test_a_module_that_is_not_there_is_told_before_the_model_is_fetched(
    source: str, drafter: FakeHub, person: Person
) -> None:
    says_one_sentence(person.is_told("pull", DRAFTING, "--mtp", source), source)
    assert not [path for _, path, _ in drafter.requests if DRAFTING in path]


def test_the_models_own_weights_are_no_module_and_stay(drafter: FakeHub, person: Person) -> None:
    says_one_sentence(person.is_told("pull", DRAFTING, "--mtp", DRAFTING), "holds no MTP module for this model")
    assert (person.snapshot(DRAFTING) / "model.safetensors").is_file()


def test_a_module_for_another_family_or_beside_no_download_is_refused(drafter: FakeHub, person: Person) -> None:
    drafter.repositories["org/llama"] = files_of(tiny_models.write("llama", person.home / "llama"))
    words = "no MTP module of its family is known"
    says_one_sentence(person.is_told("pull", "org/llama", "--mtp", MODULE), words)
    says_one_sentence(person.is_told("pull", "demo", "--mtp", MODULE), "name a pulled model")


def test_ctrl_c_keeps_what_was_fetched_of_a_module(drafter: FakeHub, person: Person) -> None:
    person.is_told("pull", DRAFTING)
    drafter.pause_after_bytes = 1000
    process = person.start("pull", DRAFTING, "--mtp", MODULE)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not person.parts():
        assert process.poll() is None and time.monotonic() < deadline, "nothing was fetched"
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=DEADLINE_SECONDS)
    says_one_sentence(Result(process.returncode, "", errors), f"pull {DRAFTING} --mtp {MODULE}", status=130)
    assert not (person.snapshot(DRAFTING) / "mtp.safetensors").exists()
    drafter.resume.set()
    drafter.pause_after_bytes = None
    assert person.is_told("pull", DRAFTING, "--mtp", MODULE).status == 0
    assert person.parts() == []
