"""What can happen to files: each function damages something below a path, as a random generator says.

Some damage is blind (cut, zeroed, flipped, swapped); most is not: rows of Arrow files that no recording could have
written, JSON of the wrong types, headers that lie. Those get past the first checks and into the engine.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

Mutation = Callable[[random.Random, Path], None]

NUMBERS = [
    -1, 0, 1, 2, -2, 7, 10**9, 2**31 - 1, 2**31, -(2**31), 2**32, 10**15, 2**53 + 1, 2**62, 2**63 - 2, 2**63 - 1,
    -(2**63),
]  # fmt: skip
FLOATS = [
    float("nan"), float("inf"), -float("inf"), 0.0, -0.0, -1.0, 1e308, -1e308, 1.7976931348623157e308, 5e-324, 1e-300,
]  # fmt: skip
DTYPES = [
    "float64", "bfloat16", "float16", "float8_e4m3fn", "complex64", "complex128", "bool", "int64", "uint8", "int4",
    "float99", "", "object", "float4_e2m1fn_x2", "qint8", "uint64",
]  # fmt: skip
WORDS = [
    "", ".", "/", "..", "<root>", "\x00", "\n", "a" * 70_000, "é\u202e" * 50, "0", "-1", "1.2.3", "in.0", "out",
    "kwargs.mask", "nan", "null", "None", "true", "[]", "{}", '{"a": 1}', "[" * 3000, '[{"a": [1, {"b": null}]}]',
    "h.0", "h.999999999999", "layers.1/relu", "/relu", "//", "layers.", ".layers", "../../x", "0:2", ":", "::",
    "0:999999999999", "-5:", "...", "::0", "1,2,3", "module", "function", "op", "parameter", "optimizer", "collective",
    "custom", "forward", "backward", "update", "input", "output", "gradient", "state", "astray/settings",
    "mesh(2) shard(0)", "Shard(0)", "\ud7ff", "*", "(", "\\", '{"mesh": [2], "placements": ["S(0)"]}', "cuda:0", "meta",
]  # fmt: skip


def _nested(depth: int) -> list[Any]:
    """A list in a list in a list …"""
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


SHAPES = [
    [], [0], [1], [-1], [2**40] * 3, [1] * 70, [2**62, 4], [2**63 - 1], [3, 0, 2], [2, -3], [5, 6], [10**9] * 2, [30],
]  # fmt: skip
ODD: list[Any] = [
    None, -1, 0, 1, 1 << 80, -(1 << 63), 10**9, 1e300, 0.5, "", "../../secret", "/etc/passwd", "\x00", "torch.float99",
    [], {}, True, [[[[1]]]], {"type": "torch.Tensor"}, {"shape": [1 << 40] * 3}, "NaN", ["a", 1, None], "é" * 5000,
    [0] * 2000, {str(n): n for n in range(300)}, "2024-01-01", "0:2", {"a": {"b": {"c": {}}}}, float("nan"),
    float("inf"), _nested(400), _nested(900), {"a": _nested(300)},
]  # fmt: skip


def files_of(path: Path, *endings: str) -> list[Path]:
    """The files below a path whose names end so; those of all names if no ending is given."""
    found = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    return [one for one in found if not endings or one.name.endswith(endings)]


# -- blind -----------------------------------------------------------------------------------------------------------


def cut(chance: random.Random, path: Path) -> None:
    file = chance.choice(files_of(path))
    os.truncate(file, chance.randrange(file.stat().st_size + 1))


def flip(chance: random.Random, path: Path) -> None:
    file = chance.choice(files_of(path))
    content = bytearray(file.read_bytes() or b"x")
    for _ in range(chance.choice((1, 1, 1, 3, 20))):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def zero(chance: random.Random, path: Path) -> None:
    file = chance.choice(files_of(path))
    content = bytearray(file.read_bytes())
    start = chance.randrange(len(content) + 1)
    stop = min(len(content), start + chance.choice((1, 8, 64, 512, 1 << 20)))
    content[start:stop] = bytes([chance.choice((0, 0, 255))]) * (stop - start)
    file.write_bytes(content)


def word(chance: random.Random, path: Path) -> None:
    """A whole number somewhere in a file becomes another."""
    file = chance.choice(files_of(path, ".arrows", ".safetensors", ".npy", ".pt", ".pkl") or files_of(path))
    content = bytearray(file.read_bytes())
    kind = chance.choice(["<i", "<q", "<I", "<H"])
    size = struct.calcsize(kind)
    if len(content) < 2 * size:
        return
    for _ in range(chance.choice((1, 1, 4))):
        at = chance.randrange((len(content) - size) // size + 1) * size
        mask = (1 << 8 * size) - 1
        number = chance.choice(NUMBERS) & mask
        content[at : at + size] = number.to_bytes(size, "little")
    file.write_bytes(content)


def lose(chance: random.Random, path: Path) -> None:
    chance.choice(files_of(path)).unlink()


def empty(chance: random.Random, path: Path) -> None:
    chance.choice(files_of(path)).write_bytes(b"")


def grow(chance: random.Random, path: Path) -> None:
    file = chance.choice(files_of(path))
    content = file.read_bytes()
    file.write_bytes(content + (content if chance.random() < 0.5 else chance.randbytes(100)))


def swap(chance: random.Random, path: Path) -> None:
    """Two files change places."""
    files = files_of(path)
    one, other = chance.choice(files), chance.choice(files)
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def rename(chance: random.Random, path: Path) -> None:
    if path.is_file():
        return flip(chance, path)
    file = chance.choice(sorted(path.rglob("*")))
    name = chance.choice(
        (
            "%s.bak",
            "x" * 200 + "%s",
            "\x1b[31m%s",
            "..%s",
            "micro_step_%s",
            "-1_%s",
            "rank7",
            "rank999999999",
            "step10000000000000000000",
            "rank0",
            "0",
            "step0",
        )
    )
    target = file.with_name(name.replace("%s", file.name)[:250])
    if not target.exists():
        file.rename(target)
    return None


def copy(chance: random.Random, path: Path) -> None:
    """A folder is there twice."""
    if path.is_file():
        return flip(chance, path)
    folders = sorted(one for one in path.rglob("*") if one.is_dir())
    if not folders:
        return flip(chance, path)
    folder = chance.choice(folders)
    name = chance.choice(("rank1", "rank7", "rank999999999", "step0", "step99999999999", "rank", "proc3", "step7"))
    target = folder.with_name(name)
    if not target.exists() and not target.is_relative_to(folder):
        shutil.copytree(folder, target)
    return None


BLIND: list[Mutation] = [cut, flip, zero, word, word, lose, empty, grow, swap, rename, copy]


# -- JSON ------------------------------------------------------------------------------------------------------------


def wrong_types(chance: random.Random, path: Path) -> None:
    """Something in a JSON becomes something else."""
    texts = files_of(path, ".json", ".jsonl", ".pkl")
    if not texts:
        return flip(chance, path)
    file = chance.choice(texts)
    try:
        text = file.read_text()
    except ValueError:  # a pickle
        return flip(chance, path)
    lines = [text] if file.name.endswith(".json") else text.splitlines()
    for _ in range(chance.choice((1, 1, 3))):
        at = chance.randrange(len(lines) or 1)
        try:
            lines[at] = json.dumps(changed(chance, json.loads(lines[at])))
        except (ValueError, IndexError, RecursionError):
            lines = ["[" * chance.choice((3, 5000))]
    if len(lines) > 1 and chance.random() < 0.2:
        chance.shuffle(lines)
        lines += lines[: chance.randrange(3)]
    file.write_text("\n".join(lines))
    return None


def changed(chance: random.Random, value: Any) -> Any:
    """The same with something in it changed."""
    inside = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not inside or chance.random() < 0.15:
        return chance.choice(ODD)
    key = chance.choice(inside)
    found = dict(value) if isinstance(value, dict) else list(value)
    if isinstance(value, dict) and chance.random() < 0.15:
        found[str(chance.choice(ODD))] = found.pop(key)
    elif chance.random() < 0.1:
        del found[key]
    elif isinstance(value, list) and chance.random() < 0.1:
        found.append(chance.choice([*value, *ODD]))  # type: ignore[union-attr]
    else:
        found[key] = changed(chance, value[key])
    return found


def tokens(chance: random.Random, path: Path) -> None:
    """Words of a JSON become NaN, Infinity, or too large for any float."""
    texts = files_of(path, ".json", ".jsonl")
    if not texts:
        return flip(chance, path)
    file = chance.choice(texts)
    try:
        words = file.read_text().split(" ")
    except ValueError:
        return flip(chance, path)
    for _ in range(5):
        new = chance.choice(("NaN,", "Infinity,", "-Infinity,", "1e999,", "nul,", "9" * 5000 + ",", "-0,", '"'))
        words[chance.randrange(len(words))] = new
    file.write_text(" ".join(words))
    return None


# -- safetensors -----------------------------------------------------------------------------------------------------


def header(chance: random.Random, path: Path) -> None:
    """The header of a safetensors file says something else."""
    files = files_of(path, ".safetensors")
    if not files:
        return flip(chance, path)
    file = chance.choice(files)
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    try:
        found = json.loads(content[8 : 8 + length])
    except ValueError:
        return flip(chance, path)
    raw = json.dumps(changed(chance, found)).encode().ljust(length if chance.random() < 0.5 else 0)
    said = chance.choice((len(raw), len(raw), len(raw), *(number & (2**64 - 1) for number in NUMBERS)))
    file.write_bytes(said.to_bytes(8, "little") + raw + content[8 + length :])
    return None


# -- Arrow -----------------------------------------------------------------------------------------------------------


def rows(chance: random.Random, path: Path) -> None:
    """A table says what no recording could."""
    files = files_of(path, ".arrows")
    if not files:
        return wrong_types(chance, path)
    file = chance.choice(files)
    found = read_columns(file)
    if found is None:
        return flip(chance, path)
    columns, types = found
    has_rows = any(columns.values())
    for _ in range(chance.choice((1, 1, 2, 4))):
        if has_rows:
            chance.choice(EDITS)(chance, columns, types)
    write_columns(chance, file, columns, types)
    return None


Columns = dict[str, list[Any]]
Types = dict[str, pa.DataType]


def read_columns(file: Path) -> tuple[Columns, Types] | None:
    """A table as lists of cells; None when it has been damaged before."""
    try:
        with pa.ipc.open_stream(file.read_bytes()) as stream:
            table = stream.read_all()
        table.validate(full=True)  # whose offsets may lead anywhere, which pyarrow follows
        columns = {name: table[name].to_pylist() for name in table.column_names}
    except (pa.ArrowException, OSError, ValueError, SystemError, MemoryError):
        return None
    return columns, {field.name: field.type for field in table.schema}


def _odd(chance: random.Random, name: str, cells: list[Any], kind: pa.DataType) -> Any:
    """A cell that fits a column by its type, and by little else."""
    if chance.random() < 0.15 and cells:
        return chance.choice(cells)
    if chance.random() < 0.1:
        return None
    if pa.types.is_floating(kind):
        return chance.choice(FLOATS)
    if pa.types.is_boolean(kind):
        return chance.random() < 0.5
    if pa.types.is_string(kind):
        return chance.choice(DTYPES) if name == "dtype" and chance.random() < 0.8 else chance.choice(WORDS)
    if pa.types.is_list(kind):
        return chance.choice(SHAPES)
    near = [cell + chance.choice((-1, 1)) for cell in cells[:20] if cell is not None]
    number = chance.choice([*NUMBERS, *near[:4]])
    low, high = {4: (-(2**31), 2**31 - 1)}.get(kind.bit_width // 8, (-(2**63), 2**63 - 1))
    if pa.types.is_unsigned_integer(kind):
        low, high = 0, 2**64 - 1
    return min(max(number, low), high)


def _cells(chance: random.Random, columns: Columns, types: Types) -> None:
    name = chance.choice(list(columns))
    for _ in range(chance.choice((1, 1, 3, 30))):
        if columns[name]:
            columns[name][chance.randrange(len(columns[name]))] = _odd(chance, name, columns[name], types[name])


def _column(chance: random.Random, columns: Columns, types: Types) -> None:
    """One cell for all rows, or another for each."""
    name = chance.choice(list(columns))
    one = _odd(chance, name, columns[name], types[name])
    each = chance.random() < 0.5
    columns[name] = [_odd(chance, name, columns[name], types[name]) if each else one for _ in columns[name]]


def _order(chance: random.Random, columns: Columns, types: Types) -> None:
    """Rows are shuffled, reversed, there twice, or missing; or only the cells of one column."""
    count = len(next(iter(columns.values())))
    order = list(range(count))
    way = chance.randrange(5)
    if way == 0:
        chance.shuffle(order)
    elif way == 1:
        order.reverse()
    elif way == 2:
        order += [chance.randrange(count) for _ in range(chance.choice((1, 5, count)))] if count else []
    elif way == 3:
        order = sorted(chance.sample(order, chance.randrange(count + 1)))
    else:
        order = order * 2
    if way < 2 and chance.random() < 0.4:
        name = chance.choice(list(columns))
        columns[name] = [columns[name][row] for row in order]
        return
    for name, cells in columns.items():
        columns[name] = [cells[row] for row in order]


def _circles(chance: random.Random, columns: Columns, types: Types) -> None:
    """Calls lie in each other."""
    if not {"parent", "seq"} <= columns.keys():
        return _cells(chance, columns, types)
    seqs = [seq for seq in columns["seq"] if seq is not None] or [None]
    types["parent"] = types["seq"]  # which an edit before may have made another
    way = chance.randrange(3)
    if way == 0:
        columns["parent"] = list(columns["seq"])
    elif way == 1:
        columns["parent"] = [chance.choice(seqs) for _ in columns["parent"]]
    else:
        columns["parent"] = [*columns["seq"][1:], *columns["seq"][:1]]
    return None


def _exchange(chance: random.Random, columns: Columns, types: Types) -> None:
    """Two columns of one type change places."""
    name = chance.choice(list(columns))
    other = chance.choice([one for one in columns if types[one] == types[name]])
    columns[name], columns[other] = columns[other], columns[name]


def _schema(chance: random.Random, columns: Columns, types: Types) -> None:
    """A column is missing, or has another name or type."""
    name = chance.choice(list(columns))
    way = chance.randrange(3)
    if way == 0 and len(columns) > 1:
        del columns[name], types[name]
    elif way == 1:
        columns[name + "x"], types[name + "x"] = columns.pop(name), types.pop(name)
    else:
        types[name] = pa.string()
        columns[name] = [None if cell is None else str(cell) for cell in columns[name]]


_COUNTERS = (
    "seq", "step", "micro", "call", "value", "stack", "blob_offset", "blob_bytes", "blob_file", "sampled", "count",
)  # fmt: skip


def _numbers(chance: random.Random, columns: Columns, types: Types) -> None:
    """Numbers of calls are the same, all other, or far away."""
    name = chance.choice([one for one in _COUNTERS if one in columns] or list(columns))
    if not pa.types.is_integer(types[name]):
        return
    low, high = (-(2**31), 2**31 - 1) if types[name].bit_width == 32 else (-(2**63), 2**63 - 1)
    shift, factor = chance.choice(((0, 0), (10**9, 1), (-(10**9), 1), (0, -1), (0, 10**9), (2**62, 1), (0, 3)))
    columns[name] = [
        None if cell is None else min(max(int(cell) * factor + shift, low), high) for cell in columns[name]
    ]


EDITS = [_cells, _cells, _cells, _cells, _column, _column, _order, _circles, _exchange, _numbers, _numbers, _schema]


def write_columns(chance: random.Random, file: Path, columns: Columns, types: Types) -> None:
    """Write a table of these cells. A text may be given as bytes, which need not be any."""
    schema = pa.schema([pa.field(name, types[name]) for name in columns])
    table = pa.table({name: _array(cells, types[name]) for name, cells in columns.items()}, schema=schema)
    # Opened by Python: an earlier damage may have given the file a name that is not text, which pyarrow refuses.
    with file.open("wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(table, max_chunksize=chance.choice((1, 7, 1000)))


def _array(cells: list[Any], kind: pa.DataType) -> pa.Array:
    if any(isinstance(cell, bytes) for cell in cells):
        raw = [cell.encode() if isinstance(cell, str) else cell for cell in cells]
        return pa.array(raw, pa.binary()).cast(kind, safe=False)
    return pa.array(cells, kind)


STRUCTURED: dict[str, list[Mutation]] = {
    ".arrows": [rows] * 6,
    ".json": [wrong_types, tokens],
    ".jsonl": [wrong_types, tokens],
    ".pkl": [wrong_types],
    ".safetensors": [header],
}


def damage(chance: random.Random, path: Path, others: Sequence[Mutation] = ()) -> list[str]:
    """Damage what is at a path in some ways, these others among them; gives their names."""
    endings = {file.suffix for file in files_of(path)}
    ways = [way for ending in sorted(endings) for way in STRUCTURED.get(ending, [])]
    done = []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        if not path.exists() or not files_of(path):
            break
        if others and chance.random() < 0.35:
            way = chance.choice(others)
        else:
            way = chance.choice(ways) if ways and chance.random() < 0.7 else chance.choice(BLIND)
        way(chance, path)
        done.append(way.__name__)
    return done
