"""Damages runs, dumps and checkpoints in ways that a seed decides, and drives every command over them.

    python tests/fuzz                        an hour of new seeds
    python tests/fuzz --minutes 5 --from 0   five minutes, from this seed on
    python tests/fuzz --seed 17              one seed again, with the whole traceback
    python tests/fuzz --only ranks,format3   of these runs alone; --list names them

A process of its own does the work, under a limit of memory and of time: one that dies or hangs is a finding too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz import corpus
from fuzz.hunting import hunt, work


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="SEED")
    parser.add_argument("--seeds", type=int, metavar="N", help="so many seeds, however long they take")
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--only", metavar="NAMES", help="only these runs, dumps and checkpoints")
    parser.add_argument("--list", action="store_true", help="name what is damaged")
    parser.add_argument("--corpus", type=Path, help="a folder to keep what is damaged in, or that has it already")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    only = options.only.split(",") if options.only else None
    if options.work is not None:
        work(options.work, options.first, options.seeds, only)
        return 0
    with tempfile.TemporaryDirectory(prefix="astray-fuzz-") as scratch:
        home = options.corpus or Path(scratch)
        if not (home / "corpus.json").exists():
            home.mkdir(parents=True, exist_ok=True)
            corpus.build(home)
        if options.list:
            print("\n".join(corpus.names(home)))
            return 0
        first, count = (options.seed, 1) if options.seed is not None else (options.first, options.seeds)
        done = hunt(
            home, first, count=count, minutes=options.minutes, only=only, tell=print, whole=options.seed is not None
        )
    print(done.summary())
    return 1 if done.findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
