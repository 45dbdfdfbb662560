"""Who provides the code of a model type, and who may not; what a provider's model must pass before it answers."""

import builtins
import importlib.metadata
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cache.layers.kinds import RowKind, leaves_of, make_caches, register_kind
from cache.layers.state import RecurrentState, arrays_in
from models import loader, providers, vlm_text
from models.errors import ModelBroken, ModelNotFound
from models.inference.gate import Gate
from models.inference.runner import Runner
from models.mlx_lm_import import ArraysCache, KVCache
from models.names import cache_folder, resolve
from models.store.library import create
from models.store.stored_model import Modelfile, WeightsPlace
from tests.support import provided, tiny_models

NAMES = ("acme-models", "other-models", "broken-models")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return provided.write_model(tmp_path_factory.mktemp("models") / "acme")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on Python's path."""
    (tmp_path / "site").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield tmp_path / "site"
    for name in (*NAMES, "mlx-vlm"):
        sys.modules.pop(name.replace("-", "_"), None)


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(folder: Path) -> str:
    with pytest.raises(ModelBroken) as caught:
        loader.load(folder, "x")
    return str(caught.value)


# ------------------------------------------------------------------------------------------ who provides


def test_an_installed_distribution_provides_a_type_and_state_names_it(folder: Path, site: Path) -> None:
    assert refused(folder).startswith("x: model type 'acme_next' is not known to mlx-lm")
    provided.install(site, "acme-models", "1.2")
    first = loader.load(folder, "x")
    model: Any = first.model
    assert type(model) is provided.Model
    assert first.state_fingerprint.endswith(" acme-models 1.2")
    shutil.rmtree(site / "acme_models-1.2.dist-info")
    provided.install(site, "acme-models", "1.3")
    assert loader.load(folder, "x").state_fingerprint == first.state_fingerprint.replace(" 1.2", " 1.3")


def test_two_providers_of_a_type_are_refused_and_named(folder: Path, site: Path) -> None:
    provided.install(site, "acme-models", "1.2")
    provided.install(site, "other-models", "0.9")
    assert "'acme_next' has several providers, acme-models 1.2 and other-models 0.9: uninstall" in refused(folder)


FAILING = {
    "raise OSError('no such\\n device')": "OSError: no such device",
    "raise SystemExit(3)": "SystemExit: 3",
    "import a_module_of_nobody": "a_module_of_nobody",
    "Model = 1": "ModelArgs",
    "this is no Python": "SyntaxError",
}


@pytest.mark.parametrize("code", FAILING)
def test_a_provider_that_cannot_be_imported_is_named(folder: Path, site: Path, code: str) -> None:
    provided.install(site, "broken-models", "2.0", code=code)
    told = refused(folder)
    assert (
        "x: cannot be loaded: broken-models 2.0, which provides 'acme_next', cannot be imported: " in told
        and FAILING[code] in told
    )


def test_a_provider_installed_in_part_is_named(folder: Path, site: Path) -> None:
    provided.install(site, "acme-models")
    (site / "acme_models.py").unlink()
    assert "acme-models 1.2 is installed only in part: there is no acme_models" in refused(folder)


# ------------------------------------------------------------------------------------------- trust


EVIL = "raise AssertionError('code that came with a model was run')\n"


def in_the_folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


def below_the_folder(tmp_path: Path) -> Path:
    return tmp_path / "model" / "code"


def in_another_model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tmp_path / "model", tmp_path / "another"))


def in_the_hubs_cache(tmp_path: Path) -> Path:
    return cache_folder() / "models--evil--evil" / "snapshots" / "0"


def linked_to_the_hubs_cache(tmp_path: Path) -> Path:
    real = cache_folder() / "models--evil--evil" / "blobs"
    real.mkdir(parents=True, exist_ok=True)
    (tmp_path / "link").symlink_to(real)
    return tmp_path / "link"


PLACES: tuple[Callable[[Path], Path], ...] = (
    *(in_the_folder, below_the_folder, in_another_model, in_the_hubs_cache, linked_to_the_hubs_cache),
)


@pytest.mark.parametrize("place", PLACES)
def test_code_that_came_with_a_model_is_never_imported(
    place: Callable[[Path], Path], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = place(tmp_path)
    provided.install(evil, "acme-models", code=EVIL)
    monkeypatch.syspath_prepend(str(evil))  # as where Python was started there
    try:
        assert "acme-models 1.2 lies with a model, and such code is never run; " in refused(folder)
        assert "acme_models" not in sys.modules
    finally:
        shutil.rmtree(cache_folder(), ignore_errors=True)


def test_code_beside_its_metadata_is_looked_at_too(folder: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata lies in an honest place, and the module that it names in the model's folder."""
    provided.install(site, "acme-models")
    (site / "acme_models.py").rename(folder / "acme_models.py")
    monkeypatch.syspath_prepend(str(folder))
    assert refused(folder).endswith(f"install it elsewhere: {folder / 'acme_models.py'}")


def test_a_configuration_chooses_no_provider(folder: Path, site: Path) -> None:
    provided.install(site, "acme-models")
    edit(folder, provider="acme-models", mlx_serve={"models": "acme_models"}, model_type="llama_of_nobody")
    assert "model type 'llama_of_nobody' is not known" in refused(folder)
    for model_type in ("acme_models.Model", "../acme_models", "acme_models:Model"):
        edit(folder, model_type=model_type)
        assert "names no model_type" in refused(folder)


def test_no_name_of_a_request_or_of_ones_own_chooses_a_provider(
    folder: Path, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provided.install(site, "acme-models")
    for name in ("acme-models", "acme_models", "acme-models==1.2", "acme-models:latest", "mlx-vlm:step3p7"):
        with pytest.raises(ModelNotFound):
            resolve(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    llama = tiny_models.write("llama", tmp_path / "llama")
    create("acme_next", WeightsPlace("folder", str(llama)), Modelfile(str(llama)))
    assert "acme" not in loader.load(resolve("acme_next"), "acme_next").state_fingerprint


# -------------------------------------------------------------------------------------------- mlx-vlm


def without_vlm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a developer has installed mlx-vlm."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == providers.VLM:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(providers, "version", version)


def test_without_mlx_vlm_its_types_say_how_to_get_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_vlm(monkeypatch)
    edit(folder, model_type="step3p7")
    assert refused(folder).endswith("; mlx-vlm has it: pip install --no-deps mlx-vlm==0.7.10")
    edit(folder, model_type="hy_v4")
    assert refused(folder).endswith(
        "; mlx-vlm 0.7.10 has it, but its answers are wrong: it fails the checks of a provider"
    )


def test_another_mlx_vlm_is_not_used(folder: Path, site: Path) -> None:
    provided.install(site, "mlx-vlm", "0.7.9", model_type="nothing", code=EVIL)
    edit(folder, model_type="step3p7")
    assert "mlx-vlm 0.7.9 is installed, and 0.7.10 alone is tested here: pip install" in refused(folder)


def test_half_an_mlx_vlm_is_told(folder: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(site), *(one for one in sys.path if not Path(one, "mlx_vlm").exists())])
    provided.install(site, "mlx-vlm", providers.VLM_VERSION, model_type="nothing")
    edit(folder, model_type="step3p7")
    (site / "mlx_vlm.py").unlink()
    assert "mlx-vlm 0.7.10 is installed only in part" in refused(folder)
    (site / "mlx_vlm" / "models").mkdir(parents=True)
    (site / "mlx_vlm" / "__init__.py").write_text(EVIL)
    importlib.invalidate_caches()
    assert "mlx-vlm 0.7.10, which provides 'step3p7', cannot be imported: ModuleNotFoundError" in refused(folder)
    assert "mlx_vlm" not in sys.modules


def test_a_model_of_mlx_lm_asks_for_no_other_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time and memory at the start are as before: nothing is looked for, imported or checked."""
    real = builtins.__import__

    def imported(name: str, *arguments: Any) -> Any:
        assert name not in ("models.vlm_text", "models.inference.gate", "mlx_vlm")
        return real(name, *arguments)

    def asked(**_: object) -> None:
        raise AssertionError("providers were looked for")

    monkeypatch.setattr(builtins, "__import__", imported)
    monkeypatch.setattr(providers, "entry_points", asked)
    assert loader.load(tiny_models.write("llama", tmp_path / "llama"), "x").state_fingerprint.count("mlx") == 2


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_what_mlx_vlm_needs_of_recurrent_caches_changes_no_model_of_mlx_lm(name: str) -> None:
    model: Any = tiny_models.build(name)

    def answers() -> list[mx.array]:
        rows, told = [make_caches(model) for _ in range(2)], list[mx.array]()
        for caches, tokens in zip(rows, ([5, 6, 7, 8], [9, 10]), strict=True):
            told += [model(mx.array([tokens]), cache=caches), *arrays_in(RecurrentState(caches).caches)]
        leaves = [[leaf for leaf in leaves_of(caches) if type(leaf) is ArraysCache] for caches in rows]
        merged = [arrays_in(ArraysCache.merge(pair)) for pair in zip(*leaves, strict=True)]
        return told + [array for arrays in merged for array in arrays]

    before, own = answers(), dict(vars(ArraysCache))
    try:
        vlm_text.extend_arrays_cache()
        after = answers()
        assert {"update_recurrent", "is_speculating"} <= vars(ArraysCache).keys() - own.keys()
        assert {key: one for key, one in vars(ArraysCache).items() if key in own} == own, "nothing is replaced"
    finally:
        for key in vars(ArraysCache).keys() - own.keys():
            delattr(ArraysCache, key)
    assert all(mx.array_equal(one, other) for one, other in zip(before, after, strict=True))


# ---------------------------------------------------------------------------------------------- gate


FAULTS = {
    "window": "a row in pieces differs from token 12 on, beyond 12 (window_size)",
    "frozen": "a row in pieces differs from token 21 on, beyond 20 (index_topk)",
    "overlap": "a row in pieces differs from token 7 on, beyond 2 (compress_ratio)",
    "counted": "a row restored differs from token 4 on, beyond 2 (compress_ratio)",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_wrong_model_is_refused_by_the_check_that_names_its_fault(fault: str, folder: Path, site: Path) -> None:
    provided.install(site, "acme-models")
    edit(folder, fault=fault)
    assert refused(folder) == f"x: refused, since the code of acme-models 1.2 fails a check: {FAULTS[fault]}"


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_right_model_passes_in_any_precision(dtype: mx.Dtype) -> None:
    model: Any = tiny_models.make(provided.CONFIG, lambda config: (provided.Model, provided.ModelArgs))
    model.set_dtype(dtype)
    assert Gate(model, float("inf")).find_fault() is None


@pytest.mark.parametrize("fault", FAULTS)
def test_half_precision_hides_no_such_fault(fault: str) -> None:
    config = provided.CONFIG | {"fault": fault}
    model: Any = tiny_models.make(config, lambda config: (provided.Model, provided.ModelArgs))
    model.set_dtype(mx.bfloat16)
    assert Gate(model, float("inf")).find_fault() is not None


def test_checks_that_take_too_long_refuse_and_say_how_to_wait(folder: Path, site: Path) -> None:
    provided.install(site, "acme-models")
    model: Any = loader.load(folder, "x").model
    ticks = count()
    fault = Gate(model, 20.0, clock=lambda: float(next(ticks))).find_fault()
    assert fault == "its checks take more than 20 s; raise --provider-check"
    assert Gate(model, 1e6, clock=lambda: float(next(ticks))).find_fault() is None


def test_a_provider_that_fails_at_its_first_token_is_named(folder: Path, site: Path) -> None:
    code = "from tests.support.provided import Model as M, ModelArgs\nclass Model(M):\n    __call__ = None\n"
    provided.install(site, "acme-models", code=code)
    assert "x: the model does not run by the code of acme-models 1.2: " in refused(folder)


def test_weights_of_a_provided_model_are_converted_and_answer_alike(folder: Path, site: Path, tmp_path: Path) -> None:
    provided.install(site, "acme-models")
    loader.convert_weights(folder, "x", tmp_path / "converted", None, lambda done, total: None)
    first, second = (loader.load(path, "x").model for path in (folder, tmp_path / "converted"))
    tokens = mx.array([[1, 2, 3]])
    one, other = (model(tokens, cache=make_caches(model)) for model in (first, second))
    assert mx.array_equal(one, other)


# -------------------------------------------------------------------------- rows of many components


class IndexedCache(KVCache):  # type: ignore[misc]
    """As a cache whose attention chooses keys by others: `tags` has a row for each token, too."""

    tags: mx.array | None = None


class _Indexed(RowKind):
    num_components = 4
    has_spare = can_join = can_group = can_share_head = False

    def forget(self, cache: Any, num_tokens: int) -> None:
        super().forget(cache, num_tokens)
        cache.tags = cache.tags[:, : cache.offset]

    def arrays(self, cache: Any) -> list[mx.array]:
        if cache.keys is None:
            return []
        nothing = mx.zeros((1, 1, cache.offset, 0))  # rows may be of no width
        return [*super().arrays(cache), cache.tags[:, None, : cache.offset], nothing]

    def load(self, cache: Any, arrays: list[mx.array], num_rows: int, offset: int) -> None:
        super().load(cache, arrays[:2], num_rows, offset)
        cache.tags = arrays[2][:, 0, :offset]


class IndexedModel(provided.Model):
    """Its span layer adds the newest tags to what it attends to."""

    def __init__(self, args: provided.ModelArgs, *, forgets: bool = False) -> None:
        super().__init__(args)
        self.forgets = forgets

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        span = cache[1]
        new = self.embed(tokens)
        span.tags = new if span.tags is None or self.forgets else mx.concatenate([span.tags, new], axis=1)
        seen = mx.cumsum(span.tags, axis=1)[:, -tokens.shape[1] :]
        logits: mx.array = super().__call__(tokens, cache) + self.head(seen) * 0.1
        return logits

    def make_cache(self) -> list[Any]:
        window, _, recurrent = super().make_cache()
        return [window, IndexedCache(), recurrent]


def indexed(**options: Any) -> Any:
    register_kind(IndexedCache, _Indexed())
    make = lambda args: IndexedModel(args, **options)  # noqa: E731
    return tiny_models.make(provided.CONFIG, lambda config: (make, provided.ModelArgs))


def test_rows_of_many_components_draft_and_go_one_by_one_and_say_why() -> None:
    runner = Runner(indexed(), vocab_size=tiny_models.VOCAB, max_probe_seconds=float("inf"))
    assert runner.abilities.rows_form == "one by one, because IndexedCache has no ragged form"
    assert runner.abilities.drafts_form == "from earlier text, where they pay"


def test_rows_of_many_components_are_taken_apart_and_restored() -> None:
    assert Gate(indexed(), float("inf")).find_fault() is None
    with pytest.raises(AssertionError, match="1 rows for the tokens"):
        Gate(indexed(forgets=True), float("inf")).find_fault()
