"""The files of one run: their numbers, their folders, and the index of modules. Recordings may share one."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from pathlib import Path

from astray.foreign.hooktools.layout import INDEX, Label, file_name, run_name


class Series:
    """The files of a run, which several recordings may write one after another: numbers go on where they were."""

    def __init__(self, log_dir: Path, name: str, stamp: int) -> None:
        self.log_dir, self.name, self.stamp = log_dir, name, stamp
        self.counts: Counter[str] = Counter()  # of the files of each phase
        self.functions: Counter[str] = Counter()  # calls of each
        self.rank: int | None = None
        self._index: dict[str, list[str]] = {}
        self._index_is_new = False
        self.calls = 0
        self.micros: dict[Label, int] = {}
        self._folders: set[Path] = set()
        self._lock = threading.Lock()  # gradients may be saved while a trace is being written

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.log_dir / run_name(self.name, self.stamp, self.rank)

    def ended(self, calls: int, micros: dict[Label, int]) -> None:
        """A recording is over that had so many calls, and so many micro steps in each step."""
        self.calls += calls
        for label, count in micros.items():
            self.micros[label] = self.micros.get(label, 0) + count

    def file(self, phase: str, label: Label, module: str) -> Path:
        """The place of the next file of a phase."""
        folder = self.folder / phase / str(label)
        with self._lock:
            if folder not in self._folders:
                folder.mkdir(parents=True, exist_ok=True)
                self._folders.add(folder)
            path = folder / file_name(phase, self.counts[phase])
            self.counts[phase] += 1
            self._index.setdefault(module, []).append(str(path))
            self._index_is_new = True
        return path

    def write_index(self) -> None:
        """Write the JSON that says in which files each module is, if there are new ones."""
        with self._lock:
            if not self._index_is_new:
                return
            self._index_is_new = False
            path = self.log_dir / f"{run_name(INDEX[:-1], self.stamp, self.rank)}.json"
            draft = path.with_name(f".{path.name}.{os.getpid()}")
            draft.write_text(json.dumps(self._index, ensure_ascii=False), "utf-8", "replace")
            draft.replace(path)
