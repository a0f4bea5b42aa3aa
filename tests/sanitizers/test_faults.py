"""`make sanitize` and `make sanitize-threads` can fail: planted faults are found, under the options of the run itself.

A sanitizer that was preloaded wrongly, or whose suppressions cover everything, would find nothing and say nothing.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

_ASKED = re.search(r"-fsanitize=(\S+)", os.environ.get("CXX", ""))
if not _ASKED:
    pytest.skip("it belongs to `make sanitize` and `make sanitize-threads`", allow_module_level=True)

SANITIZERS = _ASKED[1].split(",")
FAULTS = [
    ("thread", "race", "WARNING: ThreadSanitizer: data race"),
    ("thread", "race_without_the_interpreter", "WARNING: ThreadSanitizer: data race"),
    ("thread", "race_of_copies", "WARNING: ThreadSanitizer: data race"),
    ("thread", "use_what_another_thread_frees", "WARNING: ThreadSanitizer: data race"),
    ("address", "read_behind_the_end", "ERROR: AddressSanitizer: heap-buffer-overflow"),
    ("undefined", "overflow", "runtime error: signed integer overflow"),
]
RUN = """
import sys, threading
import torch  # as it is beside our own code
sys.path.insert(0, sys.argv[1])
sys.setswitchinterval(1e-5)
import faulty
work, times = getattr(faulty, sys.argv[2]), int(sys.argv[3])
def often():
    for _ in range(times): work()
threads = [threading.Thread(target=often) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `faulty` is, built as our own code is."""
    folder = tmp_path_factory.mktemp("faulty")
    module, source = f"faulty{sysconfig.get_config_var('EXT_SUFFIX')}", Path(__file__).with_name("faulty.cpp")
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-isystem", sysconfig.get_paths()["include"]]
    compiler = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run(
        [*shlex.split(os.environ["CXX"]), *flags, str(source), "-o", str(folder / module)], check=True, env=compiler
    )
    return folder


def run(folder: Path, name: str, times: int) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    for options in ("TSAN_OPTIONS", "ASAN_OPTIONS", "UBSAN_OPTIONS"):  # what is found here is not a finding of the run
        environment[options] = f"{environment.get(options, '')}:log_path=stderr"
    given = [sys.executable, "-c", RUN, str(folder), name, str(times)]
    return subprocess.run(given, capture_output=True, text=True, env=environment, timeout=300, check=False)


@pytest.mark.parametrize(
    ("name", "said"), [pytest.param(name, said, id=name) for kind, name, said in FAULTS if kind in SANITIZERS]
)
def test_a_fault_is_found(folder: Path, name: str, said: str) -> None:
    done = run(folder, name, 1)
    assert said in done.stderr
    assert "faulty.cpp:" in done.stderr  # in which line
    assert done.returncode


def test_what_holds_the_interpreter_is_not_a_race(folder: Path) -> None:
    done = run(folder, "with_the_interpreter", 5000)
    assert (done.returncode, done.stderr) == (0, "")
