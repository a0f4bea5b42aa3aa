"""Goes from seed to seed: a worker damages files and drives commands; the caller watches it from another process."""

from __future__ import annotations

import faulthandler
import json
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz import corpus, mutations, names

MEMORY = 3 << 30
"""Bytes of addresses that a worker may take beyond those it has when it begins."""

LATE = 5_000_000
"""Seeds from here on know the odd names, and what came late to the corpus and to the actions. Those below do what they
did before, so that a seed that is kept as a test finds what it once found."""

SILENCE = 300
"""Seconds in which a worker must say something: an action may compute for 30 s, on a machine that others use too."""


@dataclass
class Hunt:
    """What was tried and what was found."""

    tried: int = 0
    actions: int = 0
    findings: Counter[tuple[str, str]] = field(default_factory=Counter)
    seeds: dict[tuple[str, str], int] = field(default_factory=dict)

    def summary(self) -> str:
        lines = [f"{self.tried:,} damaged, {self.actions:,} actions, {len(self.findings)} kinds of findings"]
        for kind, count in self.findings.most_common():
            lines.append(f"  {count:5}x  {kind[1]}  {kind[0]}  (--seed {self.seeds[kind]})")
        return "\n".join(lines)


def work(home: Path, first: int, count: int | None, only: Sequence[str] | None) -> None:
    """Be the worker: damage and drive seed after seed, a line of JSON for each."""
    from fuzz import driving

    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, chain=True)
    with Path("/proc/self/statm").open() as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    known = [name for name in corpus.names(home) if only is None or name in only]
    seed = first
    while count is None or seed < first + count:
        chance = random.Random(seed)
        there = known if seed >= LATE or only else [name for name in known if name not in corpus.LATE]
        name = chance.choices(there, [3 if name in corpus.NATIVE else 1 for name in there])[0]
        _say(seed=seed, name=name)
        with tempfile.TemporaryDirectory(prefix="astray-fuzz-") as scratch:
            scene, done = _staged(Path(scratch), home, name, chance, late=seed >= LATE)
            actions = driving.chosen(chance, late=seed >= LATE)
            found = driving.drive(driving.Scene(*scene, chance), actions)
        _say(seed=seed, damage=done, actions=len(actions), findings=[one._asdict() for one in found])
        seed += 1


def _staged(
    scratch: Path, home: Path, name: str, chance: random.Random, late: bool
) -> tuple[tuple[Path, Path, Path], list[str]]:
    """A damaged copy, what it is compared with, and a folder for what is written."""
    one, other = corpus.pair(home, name)
    damaged, out = scratch / "damaged" / one.name, scratch / "out"
    out.mkdir()
    damaged.parent.mkdir()
    shutil.copytree(one, damaged) if one.is_dir() else shutil.copy(one, damaged)
    return (damaged, other, out), mutations.damage(chance, damaged, [names.odd_names] if late else ())


def _say(**what: Any) -> None:
    sys.__stdout__.write(json.dumps(what) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


def hunt(
    home: Path,
    first: int = 0,
    *,
    count: int | None = None,
    minutes: float = 60,
    only: Sequence[str] | None = None,
    tell: Callable[[str], object] = print,
    whole: bool = False,
) -> Hunt:
    """Have seeds tried, from `first` on, until so many are done or so many minutes are over."""
    done = Hunt()
    until = time.monotonic() + minutes * 60
    seed = first
    while time.monotonic() < until and (count is None or seed < first + count):
        rest = None if count is None else first + count - seed
        seed = _watch(done, home, seed, rest, until, only, tell, whole)
    return done


def _watch(
    done: Hunt,
    home: Path,
    seed: int,
    count: int | None,
    until: float,
    only: Sequence[str] | None,
    tell: Callable[[str], object],
    whole: bool,
) -> int:
    """Watch one worker until it ends, dies, hangs, or the time is over; gives the next seed to try."""
    command = [sys.executable, str(Path(__file__).parent), "--work", str(home), "--from", str(seed)]
    command += ["--seeds", str(count)] if count is not None else []
    command += ["--only", ",".join(only)] if only is not None else []
    name = ""
    places = [str(Path(place).absolute()) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    settings = os.environ | {"PYTHONPATH": os.pathsep.join(places)}  # the worker runs in another folder
    with (
        tempfile.TemporaryDirectory(prefix="astray-fuzz-", ignore_cleanup_errors=True) as room,  # of one that is killed
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, cwd=room, env=settings | {"TMPDIR": room}
        ) as worker,
    ):
        assert worker.stdout is not None
        try:
            while True:
                wait = min(SILENCE, until - time.monotonic())
                if not select.select([worker.stdout], [], [], max(0, wait))[0]:
                    if time.monotonic() >= until:
                        return seed
                    worker.terminate()
                    time.sleep(1)
                    _note(
                        done,
                        seed,
                        name,
                        [],
                        {"action": "", "error": "it hangs", "where": "", "told": _read(errors)},
                        tell,
                        whole,
                    )
                    return seed + 1
                line = worker.stdout.readline()
                if not line:
                    if worker.wait() == 0:
                        return seed + 1 if count is None else seed + count
                    told = _read(errors)
                    error = f"it died with {worker.returncode}: {told.strip().splitlines()[-1:]}"
                    _note(done, seed, name, [], {"action": "", "error": error, "where": "", "told": told}, tell, whole)
                    return seed + 1
                try:
                    said = json.loads(line)
                except ValueError:  # nothing but a report may be printed, and those of commands are caught
                    error = f"it printed: {line.decode(errors='replace').strip()[:200]}"
                    _note(done, seed, name, [], {"action": "", "error": error, "where": "", "told": ""}, tell, whole)
                    continue
                if "name" in said:
                    seed, count, name = said["seed"], count and count - (said["seed"] - seed), said["name"]
                    continue
                done.tried += 1
                done.actions += said["actions"]
                for one in said["findings"]:
                    _note(done, seed, name, said["damage"], one, tell, whole)
        finally:
            worker.kill()


def _note(
    done: Hunt, seed: int, name: str, damage: list[str], one: dict[str, str], tell: Callable[[str], object], whole: bool
) -> None:
    error = one["error"].splitlines()[0]
    kind = (one["where"] or error, one["error"].partition(":")[0] if one["where"] else error[:120])
    done.findings[kind] += 1
    if kind not in done.seeds or whole:
        done.seeds[kind] = seed
        tell(f"seed {seed} ({name}, {'+'.join(damage)}) {one['action']}: {one['where']} {error}")
        if whole:
            tell(one["told"])


def _read(errors: Any) -> str:
    errors.seek(0)
    text: str = errors.read().decode(errors="replace")
    return text
