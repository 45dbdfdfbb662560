"""What a model folder brings is data: its code is never run, and files in its formats cannot do harm."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from models.errors import ModelBroken, ModelError, ModelNotFound
from models.loader import load
from models.names import resolve
from models.weights import read_header
from tests.support import tiny_models

Plant = Callable[[Path], object]

CODE_FILES = (
    *("evil.py", "modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "processing_evil.py"),
    *("__init__.py", "sitecustomize.py", "transformers.py", "mlx_lm.py", "jinja2.py", "custom_generate/generate.py"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A model with code wherever a library might look for it, each of which leaves a file `run` behind."""
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    for name in CODE_FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"open({str(tmp_path / 'run')!r}, 'a').write(__name__)\nraise SystemExit(3)\n")
    return folder


def edit(file: str, **changes: Any) -> Plant:
    def change(folder: Path) -> None:
        path = folder / file
        found = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**found, **changes}))

    return change


def both(*plants: Plant) -> Plant:
    return lambda folder: [plant(folder) for plant in plants]


def without_tokenizer_file(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{}")
    (folder / "merges.txt").write_text("")


MODEL_CODE = {"AutoConfig": "configuration_evil.EvilConfig", "AutoModelForCausalLM": "modeling_evil.EvilModel"}
TOKENIZER_CODE = {"AutoTokenizer": ["tokenization_evil.EvilTokenizer", None]}
ELSEWHERE = {"AutoTokenizer": ["someone/else--tokenization_evil.EvilTokenizer", None]}

NEEDLESS: dict[str, Plant] = {
    "a model that mlx-lm knows": edit("config.json", auto_map=MODEL_CODE),
    "a tokenizer that is a file": edit("tokenizer_config.json", auto_map=TOKENIZER_CODE),
    "a tokenizer of another repository": edit("tokenizer_config.json", auto_map=ELSEWHERE),
    "an unknown tokenizer class": edit("tokenizer_config.json", tokenizer_class="EvilTokenizer"),
    "a class by its module": edit("tokenizer_config.json", tokenizer_class="evil.EvilTokenizer"),
    "a processor": both(
        edit("processor_config.json", auto_map={"AutoProcessor": "processing_evil.P"}, chat_template="{{ evil }}"),
        edit("preprocessor_config.json", auto_map={"AutoImageProcessor": "processing_evil.P"}),
    ),
    "a way of generating": edit("generation_config.json", custom_generate="custom_generate", trust_remote_code=True),
    "its own consent": both(
        edit("config.json", trust_remote_code=True, auto_map=MODEL_CODE),
        edit("tokenizer_config.json", trust_remote_code=True, auto_map=TOKENIZER_CODE),
    ),
}


@pytest.mark.parametrize("plant", NEEDLESS.values(), ids=NEEDLESS)
def test_code_that_is_not_needed_is_left_alone(folder: Path, plant: Plant) -> None:
    plant(folder)
    expected = load(folder, "x").tokenizer.encode("hello there")
    assert expected == tiny_models.tokenizer().encode("hello there")
    assert not (folder.parent / "run").exists()


NEEDED: dict[str, tuple[Plant, str]] = {
    "a model by its file": (edit("config.json", model_file="evil.py"), r"code of the folder \(evil\.py\)"),
    "a model by a path": (edit("config.json", model_file="/tmp/../evil.py"), "without model_file"),
    "an unknown model": (
        edit("config.json", model_type="evil", auto_map=MODEL_CODE),
        r"'evil' is not known to mlx-lm .*\(modeling_evil\.EvilModel\) is never run",
    ),
    "a tokenizer": (
        both(edit("tokenizer_config.json", auto_map=TOKENIZER_CODE), without_tokenizer_file),
        r"tokenization_evil\.EvilTokenizer\), which mlx-serve never runs; choose .* tokenizer\.json",
    ),
    "a tokenizer in the older form": (
        both(
            edit("tokenizer_config.json", auto_map=["tokenization_evil.EvilTokenizer", None]), without_tokenizer_file
        ),
        r"tokenization_evil\.EvilTokenizer",
    ),
    "a tokenizer that the model names": (
        both(edit("config.json", auto_map=TOKENIZER_CODE), without_tokenizer_file),
        r"tokenization_evil\.EvilTokenizer",
    ),
    "a tokenizer that nothing else stands for": (
        both(
            edit("config.json", model_type="mamba2"),
            edit("tokenizer_config.json", auto_map=TOKENIZER_CODE, tokenizer_class="EvilTokenizer"),
            edit("tokenizer.json", model={"type": "Evil"}),
        ),
        "cannot be loaded|never runs",
    ),
    "templates in a module of another package": (
        edit("tokenizer_config.json", chat_template_type="..evil"),
        "tokenizer cannot be loaded",
    ),
    "a parser in a module of another package": (
        edit("tokenizer_config.json", tool_parser_type="../../evil"),
        "tokenizer cannot be loaded",
    ),
}


@pytest.mark.parametrize(("plant", "message"), NEEDED.values(), ids=NEEDED)
def test_code_that_is_needed_is_named_and_not_run(folder: Path, plant: Plant, message: str) -> None:
    plant(folder)
    with pytest.raises(ModelBroken, match=message) as raised:
        load(folder, "x")
    assert "\n" not in str(raised.value)
    assert "trust_remote_code" not in str(raised.value)
    assert not (folder.parent / "run").exists()


def test_a_process_that_was_started_in_the_folder_runs_none_of_it(folder: Path) -> None:
    """`mlx-serve serve .` is typed there, and Python would look for modules in the working directory."""
    command = Path(sys.executable).with_name("mlx-serve")
    if not command.exists():
        pytest.skip("mlx-serve is not installed here")
    edit("config.json", model_file="evil.py")(folder)
    ended = subprocess.run(
        [command, "serve", ".", "--port", "0"], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert "code of the folder (evil.py), which mlx-serve never runs" in ended.stderr
    assert not (folder.parent / "run").exists()


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("pytorch_model.bin", "PyTorch"),
        ("model.pt", "PyTorch"),
        ("model.pth", "PyTorch"),
        ("model.ckpt", "PyTorch"),
        ("model.pkl", "pickle"),
        ("weights.npz", "NumPy"),
        ("model.gguf", "GGUF"),
        ("tf_model.h5", "another framework"),
    ],
)
def test_weights_in_another_format_are_refused_by_name(folder: Path, file: str, what: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / file).write_bytes(b"cposix\nsystem\n(S'touch run'\ntR.")
    message = rf"{what}.*only the safetensors format is read.*mlx-serve convert"
    with pytest.raises(ModelNotFound, match=message):
        load(folder, "x")
    with pytest.raises(ModelBroken, match=message):
        resolve(str(folder))


def header(**tensors: Any) -> bytes:
    return json.dumps(tensors).encode()


def tensor(start: Any = 0, stop: Any = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def framed(text: bytes, num_data_bytes: int = 8) -> bytes:
    return len(text).to_bytes(8, "little") + text + bytes(num_data_bytes)


HUGE = 1 << 60
DAMAGED = {
    "a header of 2^60 bytes": (HUGE.to_bytes(8, "little") + b"{}", "header too large"),
    "a header longer than the file": ((90_000_000).to_bytes(8, "little") + b"{}", "is damaged"),
    "no header": (bytes(8), "is damaged"),
    "half a length": (b"\x01", "is damaged"),
    "nothing": (b"", "is damaged"),
    "no JSON": (framed(b"\xff\xfe{"), "damaged"),
    "brackets without end": (framed(b"[" * 200_000), "is damaged"),
    "tensors that overlap": (framed(header(a=tensor(), b=tensor(4, 12)), 12), "invalid offset for tensor"),
    "one tensor twice": (framed(header(a=tensor(), b=tensor())), "invalid offset for tensor"),
    "a tensor before the data": (framed(header(a=tensor(-8, 0))), "is damaged"),
    "a tensor that ends before it begins": (framed(header(a=tensor(8, 0))), "is damaged"),
    "a tensor of an absurd shape": (framed(header(a=tensor(shape=[HUGE, HUGE]))), "is damaged"),
    "a tensor of a negative shape": (framed(header(a=tensor(shape=[-2, -1]))), "is damaged"),
    "a shape of texts": (framed(header(a=tensor(shape=["2"]))), "is damaged"),
    "a shape that is none": (framed(header(a={**tensor(), "shape": None})), "is damaged"),
    "places that are no integers": (framed(header(a=tensor(0.0, 8.0))), "is damaged"),
    "places that are truth values": (framed(header(a=tensor(False, True, [1], "U8")), 1), "is damaged"),
    "three places": (framed(header(a={**tensor(), "data_offsets": [0, 4, 8]})), "is damaged"),
    "a type that is a list": (framed(header(a=tensor(dtype=["F32"]))), "is damaged"),
    "a tensor beyond the end": (framed(header(a=tensor(stop=HUGE, shape=[HUGE // 4]))), "is incomplete"),
    "too much data": (framed(header(a=tensor()), 9), "is incomplete"),
    "an unknown type": (framed(header(a=tensor(dtype="Q9"))), None),
}


@pytest.mark.parametrize(("data", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_of_weights_is_one_sentence(folder: Path, data: bytes, message: str | None) -> None:
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelBroken, match=message) as raised:
        load(folder, "x")
    assert "\n" not in str(raised.value)


def test_what_files_say_of_their_size_takes_no_memory(folder: Path) -> None:
    """A header may claim 90 MB in a file of 10 bytes."""
    (folder / "model.safetensors").write_bytes((90_000_000).to_bytes(8, "little") + b"{}")
    script = f"""
import resource
from pathlib import Path
from models.weights import read_header
from models.errors import ModelBroken
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), resource.RLIM_INFINITY))
try:
    read_header(Path({str(folder / "model.safetensors")!r}))
except ModelBroken as error:
    assert "is damaged" in str(error)
"""
    if not Path("/proc/self/statm").exists():
        pytest.skip("measures memory as Linux does")
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2], timeout=300)


def test_tensors_of_every_type_are_found(tmp_path: Path) -> None:
    integers = (mx.uint8, mx.int8, mx.uint16, mx.int16, mx.uint32, mx.int32, mx.uint64, mx.int64)
    dtypes = (*integers, mx.bool_, mx.float16, mx.bfloat16, mx.float32, mx.complex64)
    arrays = {str(dtype): mx.zeros((3, 5), dtype) for dtype in dtypes} | {"none": mx.zeros((0, 4))}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays)
    assert read_header(tmp_path / "model.safetensors").keys() == arrays.keys()


def test_a_configuration_nested_without_end_is_one_sentence(folder: Path) -> None:
    error: type[ModelError] = ModelBroken
    (folder / "config.json").write_text("[" * 200_000)
    with pytest.raises(error, match=r"config\.json is damaged"):
        load(folder, "x")
