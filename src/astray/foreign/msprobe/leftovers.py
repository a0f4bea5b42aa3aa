"""Entries made from the names of tensor files that dump.json does not tell of.

msprobe writes a tensor as soon as it sees it and its JSON files now and then: a program that was killed leaves files
that no entry mentions. Their names say which tensor of which entry they are.
"""

from __future__ import annotations

import re
from collections.abc import Container
from pathlib import Path
from typing import Any

from astray.errors import RunError
from astray.foreign.dump_rows import Gathering
from astray.foreign.msprobe.files import DATA
from astray.foreign.msprobe.names import parse
from astray.foreign.msprobe.tensors import form
from astray.wording import counted

_OF_CALL = re.compile(r"(.+\.(?:forward|backward)(?:\.\d+)?)\.(input|output|kwargs|parameters)\.(.+)\.(?:pt|npy)")
_GRADIENT = re.compile(r"(.+\.parameters_grad(?:\.\d+)?)\.(.+)\.(?:pt|npy)")


def entries_of(files: list[str], folder: Path, rows: Gathering, known: Container[str]) -> dict[str, dict[str, Any]]:
    """The entries that these files belong to, without those that are known. What is odd about them is said."""
    found: dict[str, dict[str, Any]] = {}
    unread = added = 0
    for file in files:
        place = _place(file)
        if place is None or place[0] in known or parse(place[0]) is None:
            unread += 1
            continue
        name, group, path = place
        try:
            leaf = form(folder / DATA / file)
        except RunError as error:
            rows.problem(str(error))
            continue
        added += 1
        found.setdefault(name, {}).setdefault(group, {})[path] = leaf
    if added:
        rows.problem(
            f"{folder / 'dump.json'} does not tell of {counted(added, 'file')} in {DATA}: the program was stopped "
            f"before it had written that. {counted(len(found), 'call')} were made from their names."
        )
    if unread:
        rows.problem(f"{folder / DATA} holds {counted(unread, 'file')} of no entry, left out.")
    return found


def _place(file: str) -> tuple[str, str, str] | None:
    """The entry, the group of its tensors and the path in it that a file's name tells."""
    if match := _OF_CALL.fullmatch(file):
        name, group, path = match.groups()
        backward = ".backward" in name
        groups = {"input": "input" if backward else "input_args", "kwargs": "input_kwargs"}
        return name, groups.get(group, group), path
    if match := _GRADIENT.fullmatch(file):
        return match[1], match[2], "0"
    return None
