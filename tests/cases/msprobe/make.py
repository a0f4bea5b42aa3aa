"""Makes the dumps that lie beside it, by the real msprobe: `python tests/cases/msprobe/make.py`, after `make peers`.

Only what depends on the machine is changed: where files lay, and the number of the process; and spaces are left out. Of
two dumps the first step is kept.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PYTHON = ROOT / ".venv-msprobe" / "bin" / "python"

DUMPS = {
    "L0-tensor": ("L0", "tensor", "statistics"),
    "mix-statistics": ("mix", "statistics", "statistics"),
    "L1-md5": ("L1", "statistics", "md5"),
    "debug-tensor": ("debug", "tensor", "statistics"),
}


def main() -> None:
    if not PYTHON.exists():
        sys.exit(f"{PYTHON} is not there: `make peers` makes it.")
    for name, settings in DUMPS.items():
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([PYTHON, HERE / "dump.py", f"{folder}/x", *settings], check=True, capture_output=True)
            shutil.rmtree(HERE / name, ignore_errors=True)
            shutil.copytree(f"{folder}/x/dump", HERE / name)
            _settle(HERE / name, folder)
    for name in ("L0-tensor", "L1-md5"):
        shutil.rmtree(HERE / name / "step1")


def _settle(dump: Path, folder: str) -> None:
    for process in list(dump.glob("step*/proc*")):
        process.rename(process.with_name("proc7"))
    packages = str(next((ROOT / ".venv-msprobe" / "lib").glob("python*")) / "site-packages")
    for file in dump.rglob("*.json"):
        said = file.read_text().replace(packages, "/packages").replace(str(HERE), "/program")
        said = said.replace(f"{folder}/x/dump", "/dump").replace(_process(said), "proc7")
        file.write_text(json.dumps(json.loads(said)) + "\n")


def _process(said: str) -> str:
    start = said.find("/proc")
    end = start + 5
    while end < len(said) and said[end].isdigit():
        end += 1
    return said[start + 1 : end] if start >= 0 else "\0"


if __name__ == "__main__":
    main()
