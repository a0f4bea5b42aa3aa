"""Odd names in a run that is converted: no format's writer fails on one, and its reader opens it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from astray import compare
from astray.store import open_run
from astray.store.convert import convert
from astray.store.safe_paths import MOST_NAME_BYTES, file_name
from record_builders import Builder

ODD = {
    "null": "a\0b",
    "separator": "a/../../b",
    "hidden": "..",
    "long": "x" * 300,
    "long in bytes": "é" * 130,
    "half a pair": "a\ud800",
    "odd byte": "a\udcff",
    "digits": "9" * 5000,
    "no digit": "²",
    "other digits": "٣",
    "dots": "a" + ".a" * 3000,
    "numbers": "0" + ".0" * 3000,
    "None": "None",
    "node": "node.x.y.z",
    "node beyond": "node.7.2.1",
    "size": f"torch.Size([{'9' * 5000}])",
}


@pytest.mark.parametrize("name", ODD.values(), ids=list(ODD))
@pytest.mark.parametrize("format", ["astray", "msprobe", "torch_npu", "lines", "saving_hook", "hooktools"])
def test_an_odd_name_in_every_place_of_a_run(tmp_path: Path, format: str, name: str) -> None:
    run = Builder(keep="stats,fingerprint,tensors")
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    run.tensor(run.call("fine"), "output", "out", array)
    run.tensor(run.call("/relu", "torch.nn.functional.relu", kind="function"), "output", "out", array)
    for site, type, kind in ((name, "Linear", "module"), ("h", name, "module"), ("/f", f"torch.{name}", "function")):
        for phase in ("forward", "backward"):
            args = f'{{"args": ["{name}"], "kwargs": {{"{name}": 1}}}}'
            seq = run.call(site, type, kind=kind, phase=phase, args=args)
            for path in (name, f"out.{name}", f"kwargs.{name}", "out"):
                run.tensor(seq, "input", path, array)
                run.tensor(seq, "output", path, array)
    seq = run.call(name, "Parameter", kind="parameter", phase="backward")
    run.tensor(seq, "gradient", "grad", array)
    target = tmp_path / ("dump.pkl" if format == "lines" else "dump")
    convert(run.run, target, "torch_npu" if format == "lines" else format)
    assert list(tmp_path.iterdir()) == [target]
    found = open_run(target)
    for rank in found.ranks.values():
        for row in range(len(rank.tensors)):
            rank.values(row)
    compare(found, found).to_json(tmp_path / "found.json")


@pytest.mark.parametrize("dtype", [np.int64, np.bool_, np.float32])
def test_extremes_that_are_no_numbers(tmp_path: Path, dtype: type) -> None:
    run = Builder()
    run.tensor(run.call("h"), "output", "out", np.ones(4, dtype))
    rows = run.rank()._tensors
    assert rows[0].statistics is not None
    nan = rows[0].statistics._replace(min=np.nan, max=np.nan, mean=np.nan)
    rows[0] = rows[0]._replace(statistics=nan)
    convert(run.run, tmp_path / "dump", "msprobe")
    assert len(open_run(tmp_path / "dump").ranks[0].tensors) == 1


def test_a_name_of_a_file() -> None:
    assert file_name("Module.a/b\0c\ud800", ".npy") == "Module.a_b_c_.npy"
    assert file_name("x" * (MOST_NAME_BYTES - 4), ".npy") is not None
    assert file_name("x" * (MOST_NAME_BYTES - 3), ".npy") is None
    assert file_name("é" * (MOST_NAME_BYTES // 2), ".npy") is None
    assert file_name(".hidden", ".npy") is None


@pytest.mark.parametrize("depth", [600, 800, 950])
@pytest.mark.parametrize("format", ["msprobe", "hooktools"])
def test_arguments_in_each_other_without_end(tmp_path: Path, format: str, depth: int) -> None:
    run = Builder(keep="stats,tensors")
    for opens, closes in (("[", "]"), ('{"a":', "}")):
        args = f'{{"args": [{opens * depth}1{closes * depth}]}}'
        seq = run.call("/relu", "torch.nn.functional.relu", kind="function", args=args)
        run.tensor(seq, "output", "out", np.ones(4, np.float32))
    convert(run.run, tmp_path / "dump", format)
    assert len(open_run(tmp_path / "dump").ranks[0].tensors) == 2


@pytest.mark.parametrize("path", ["out.9999999", f"out.{'9' * 18}", "out" + ".0" * 3000])
def test_places_in_saved_values_that_nothing_has(tmp_path: Path, path: str) -> None:
    run = Builder()
    run.tensor(run.call("mine", "dict", kind="custom"), "output", path, np.ones(4, np.float32))
    run.tensor(run.call("other", "dict", kind="custom"), "output", "out.x", np.ones(4, np.float32))
    found = convert(run.run, tmp_path / "dump", "msprobe")
    assert found.lost["a tensor at a place that no argument has"] == 1
    assert len(open_run(tmp_path / "dump").ranks[0].tensors) == 1


@pytest.mark.parametrize("said", [5, True, {"tensors": 1}, [["tensors"], {}], [None], 0.5])
def test_settings_that_are_no_words(tmp_path: Path, said: object) -> None:
    rows = Builder()
    rows.tensor(rows.call("h"), "output", "out", np.ones(4, np.float32))
    run = rows.run
    run.info.settings.update(keep=said, level=said)
    convert(run, tmp_path / "dump", "msprobe")
    assert open_run(tmp_path / "dump").info.settings["task"] == "statistics"
