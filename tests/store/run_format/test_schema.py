"""docs/reference/format.md describes the columns of the code."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from astray.records import Call, Tensor
from astray.store import End, RunInfo
from astray.store.run_format.schema import CALLS, TENSORS, Column
from astray.store.run_info import FORMAT

DOCUMENT = (Path(__file__).parents[3] / "docs" / "reference" / "format.md").read_text()


def section(title: str) -> str:
    return DOCUMENT.split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize(("title", "columns"), [("calls.arrows", CALLS), ("tensors.arrows", TENSORS)])
def test_every_column_is_documented(title: str, columns: tuple[Column, ...]) -> None:
    lines = re.findall(r"^\| `(\w+)` \| (\S+) \| (yes)? ?\|", section(title), re.MULTILINE)
    assert [(name, kind.strip("`"), bool(null)) for name, kind, null in lines] == [tuple(column) for column in columns]


@pytest.mark.parametrize(("title", "document"), [("run.json", RunInfo), ("end.json", End)])
def test_every_field_is_documented(title: str, document: type[msgspec.Struct]) -> None:
    lines = re.findall(r"^\| (`.*?) \|", section(title), re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(lines)) == list(document.__struct_fields__)


def test_the_history_ends_with_this_version() -> None:
    assert re.findall(r"^\| (\d+) \|", section("Format versions"), re.MULTILINE)[-1] == str(FORMAT)


def test_columns_are_the_fields_of_the_records() -> None:
    assert [column.name for column in CALLS] == list(Call._fields)
    plain = set(Tensor._fields) - {"statistics", "blob"}
    assert plain <= {column.name for column in TENSORS}
