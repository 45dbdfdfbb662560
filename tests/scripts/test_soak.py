"""The soak runs on a model of each kind: it is started by hand only, and would rot unseen."""

import pytest

from cache.disk import connector
from scripts import soak


@pytest.mark.parametrize("name", ["llama_swa", "llama4", "falcon_h1"])
def test_a_short_soak_evicts_restores_and_finds_no_difference(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(connector, "MIN_RESTORE_TOKENS", 8)
    assert soak.soak(name, 20, seed=1)
    report = capsys.readouterr().out
    assert "'evictions': 0" not in report and "'from memory'" in report
