"""A rank that diverges from its replicas is found in the recording of all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from astray.cli import main
from astray.comparison.ranks.replicas import compare_replicas

from .launching import HERE, torchrun


@pytest.mark.slow
def test_the_rank_that_drifts_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torchrun(HERE / "drifting.py", tmp_path / "run", processes=3)
    found = compare_replicas(str(tmp_path / "run"))
    assert found.first is not None
    assert found.first.groups == ((0, 2), (1,))
    assert (found.first.place.step, found.first.place.site, found.first.place.path) == (2, "2", "weight")
    assert main(["compare", str(tmp_path / "run"), "--replicas"]) == 1
    assert "rank 1 went astray" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "run"), "--replicas", "--steps", "0:2"]) == 0
    assert main(["compare", str(tmp_path / "run")]) == 2
    assert "or one run and --replicas" in capsys.readouterr().err
