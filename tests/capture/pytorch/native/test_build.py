"""The native module is built once, when something is recorded; an error says what is missing if it cannot be built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from astray.capture.native.build import cache_folder
from astray.capture.pytorch.native import build
from astray.errors import RecordError

RECORD = """
import sys, torch, astray
with astray.record(sys.argv[1], torch.nn.Linear(2, 2)): pass
"""


def run(program: str, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = [sys.executable, "-c", program, *args]
    return subprocess.run(given, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def test_only_a_recording_builds(tmp_path: Path) -> None:
    program = """
import sys, torch, astray, astray.state, astray.experiment, astray.cli
from astray.compat import hooktools, msprobe, nnstat, saving_hook, torch_npu
assert not [name for name in sys.modules if name.startswith("astray.capture.pytorch.native")]
"""
    done = run(program, ASTRAY_CACHE=str(tmp_path / "cache"), CXX="false")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "cache").exists()


def test_without_a_compiler_it_says_what_to_do(tmp_path: Path) -> None:
    done = run(RECORD, str(tmp_path / "run"), ASTRAY_CACHE=str(tmp_path / "cache"), CXX="no-such-compiler -O2")
    said = done.stderr.splitlines()[-1]
    assert said.startswith("astray.errors.RecordError: To record, astray builds a part of itself for torch ")
    assert "finds no C++ compiler: 'no-such-compiler -O2', which CXX names, cannot be run. Install one" in said
    assert not (tmp_path / "run").exists()


def test_what_the_compiler_says_is_told(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho warming up\necho 'module.cpp:3: error: no torch here' >&2\nexit 1\n")
    compiler.chmod(0o755)
    done = run(RECORD, str(tmp_path / "run"), ASTRAY_CACHE=str(tmp_path / "cache"), CXX=str(compiler))
    assert f"could not be built by {compiler}:\n    module.cpp:3: error: no torch here\nInstall a C++17" in done.stderr
    assert not list((tmp_path / "cache").glob("*.so"))


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ASTRAY_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(RecordError, match=r"cannot be written .*Set ASTRAY_CACHE to a folder that can"):
        build.PART.built()


@pytest.mark.slow
def test_processes_that_come_at_once_build_once(tmp_path: Path) -> None:
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    copied = build.PART.built()
    compiler.write_text(
        f'#!/bin/sh\necho built >> {log}\nwhile [ "$1" != -o ]; do shift; done\nsleep 1\ncp {copied} "$2"\n'
    )
    compiler.chmod(0o755)
    environment = {**os.environ, "ASTRAY_CACHE": str(tmp_path / "cache"), "CXX": str(compiler)}
    program = "from astray.capture.pytorch.native.build import load; print(load().living())"
    given = [sys.executable, "-c", program]
    running = [
        subprocess.Popen(given, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [one.communicate(timeout=100) for one in running]
    assert [out for out, _ in said] == ["0\n"] * 3, said
    assert log.read_text() == "built\n"
    building = f"building the part of astray that speaks with torch {torch.__version__} (once, 10 to 30 s)\n"
    assert sorted(err for _, err in said) == ["", "", building]


def test_the_cache_is_where_it_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ASTRAY_CACHE", raising=False)
    assert cache_folder() == tmp_path / "astray"
    monkeypatch.setenv("ASTRAY_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("ASTRAY_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "astray"
