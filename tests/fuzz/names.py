"""Names that no program gives, in every place where a run, a dump or a checkpoint has a name.

Names become names of files, texts of XML, cells of sheets, keys of JSON and numbers of places. So they hold what each
of these cannot: nulls and slashes, halves of surrogate pairs, bytes that are not text, thousands of digits or of dots.
"""

from __future__ import annotations

import json
import os
import pickletools
import random
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from fuzz.mutations import Mutation, files_of, flip, read_columns, write_columns

NAMES = [
    "\x00", "a\x00b", "con", "nul.txt", "a/b", "/etc/passwd", "../../../x", "..", ".", ".hidden", "~", "x" * 256,
    "é" * 130, "x" * 5000, "x" * 40_000, "\U0001f600" * 64, "9" * 5000, "²", "out.²", "²²", "٣", "out.٣",
    f"out.{'9' * 5000}", f"out.{'9' * 20}", f"0.{'9' * 5000}", f"kwargs.{'9' * 5000}", f"kwargs.x.{'9' * 9}", "1e400",
    f"node.{'9' * 5000}", "node.²", "node.1", f"h.{'9' * 5000}.w", f"{'9' * 5000}/relu", "\r\n", "a\nb", " ", "\t=1+1",
    "=1+1", "-1+1", "@x", "</script><b>", "<!--", "]]>", "&amp;", "\x01\x0b\x1f", "\x7f\x9b31m", "\ufffe\uffff",
    "\u2028",
    "\u202e", "%00%2F", "%s{0}%(x)s", "a@b", "a_micro_step_1", "a_layer_name_b", "shape[2]_stride[1]", "*?[a-", "\\d+(",
    f"torch.Size([{'9' * 5000}])", "torch.Size([²])", f"slice(None, {'9' * 5000}, None)", f"Shard({'9' * 5000})",
    '{"placements": ["Shard(²)"]}', f"0:{'9' * 5000}", "²:", "٣:٤", f"cuda:{'9' * 5000}", f"float{'9' * 5000}",
    "a" + ".a" * 3000, "out" + ".0" * 3000, "0" + ".0" * 3000, "kwargs" + ".x" * 3000, "/" * 300, "." * 300,
    "parameters_grad",
    "Module.a.B.forward.0", f"Module.a.B.forward.{'9' * 5000}", "Functional.relu.0.forward", "astray", "data",
    "__class__",
    f'{{"args": {"[" * 400 + "]" * 400}}}',
    '{"args": [' + '{"a":' * 800 + "1" + "}" * 800 + "]}",
]  # fmt: skip
HALVES = ["\ud800", "a\udcff", "x\udfff.y", "out.\ud800", "\udc00\ud800"]
"""Halves of surrogate pairs, which JSON and pickles can hold and no encoding can."""

NO_TEXT = [b"\xff", b"a\xc3", b"\xed\xa0\x80.x", b"\x80" * 300]
"""Bytes that are not UTF-8, which a damaged Arrow file and a Linux file system can hold."""


def odd_names(chance: random.Random, path: Path) -> None:
    """Something gets a name that nothing has."""
    ways: list[tuple[tuple[str, ...], Mutation]] = [
        ((".arrows",), _in_tables),
        ((".json", ".jsonl"), _in_json),
        ((".safetensors",), _in_headers),
        ((".pt", ".pth", ".bin", ".metadata", ".pkl"), _in_pickles),
        (("",), _of_files),
    ]
    fitting = [way for endings, way in ways if files_of(path, *endings)]
    (chance.choice(fitting) if fitting else flip)(chance, path)


def _in_tables(chance: random.Random, path: Path) -> None:
    file = chance.choice(files_of(path, ".arrows"))
    found = read_columns(file)
    if found is None:
        return flip(chance, path)
    columns, types = found
    texts = [name for name in columns if pa.types.is_string(types[name]) and columns[name]]
    if not texts:
        return flip(chance, path)
    for _ in range(chance.choice((1, 1, 2))):
        name = chance.choice(texts)
        new: Any = chance.choice(NAMES) if chance.random() < 0.9 else chance.choice(NO_TEXT)
        cells = columns[name]
        old, at = chance.choice(cells), chance.randrange(len(cells))
        way = chance.randrange(4)
        if way == 0:
            cells[at] = new
        elif way == 1:
            columns[name] = [new] * len(cells)
        elif way == 2:  # what had one name has another
            columns[name] = [new if cell == old else cell for cell in cells]
        else:  # a part of a name
            columns[name] = [_joined(cell, new) for cell in cells]
    write_columns(chance, file, columns, types)
    return None


def _joined(cell: Any, new: Any) -> Any:
    if not isinstance(cell, str):
        return cell
    return f"{cell}.{new}" if isinstance(new, str) else cell.encode() + b"." + new


def _in_json(chance: random.Random, path: Path) -> None:
    file = chance.choice(files_of(path, ".json", ".jsonl"))
    try:
        text = file.read_text(encoding="utf-8")
        lines = [json.loads(line) for line in ([text] if file.name.endswith(".json") else text.splitlines())]
        known = sorted({one for line in lines for one in _texts(line)})
        if not known:
            return flip(chance, path)
        old, new = chance.choice(known), chance.choice([*NAMES, *HALVES, *HALVES, *HALVES])
        if chance.random() < 0.3:
            new = old + new
        file.write_text("\n".join(json.dumps(_renamed(line, old, new)) for line in lines), encoding="utf-8")
    except (ValueError, RecursionError):  # damaged before
        return flip(chance, path)
    return None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(one)


def _renamed(value: Any, old: str, new: str) -> Any:
    if isinstance(value, dict):
        return {new if key == old else key: _renamed(one, old, new) for key, one in value.items()}
    if isinstance(value, list):
        return [_renamed(one, old, new) for one in value]
    return new if value == old else value


def _in_headers(chance: random.Random, path: Path) -> None:
    file = chance.choice(files_of(path, ".safetensors"))
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    try:
        found = json.loads(content[8 : 8 + length])
        old, new = chance.choice(sorted(found)), chance.choice([*NAMES, *HALVES])
        raw = json.dumps(_renamed(found, old, new), ensure_ascii=new in HALVES).encode()
    except (ValueError, RecursionError, IndexError, TypeError):
        return flip(chance, path)
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + content[8 + length :])
    return None


def _in_pickles(chance: random.Random, path: Path) -> None:
    """A text or a number in a pickle becomes another; of a zip, in the pickle in it."""
    file = chance.choice(files_of(path, ".pt", ".pth", ".bin", ".metadata", ".pkl"))
    content = file.read_bytes()
    try:
        if not zipfile.is_zipfile(file):
            file.write_bytes(_repickled(chance, content))
            return None
        with zipfile.ZipFile(file) as archive:
            held = {one.filename: archive.read(one) for one in archive.infolist()}
        changed = {name: _repickled(chance, one) if name.endswith(".pkl") else one for name, one in held.items()}
        with zipfile.ZipFile(file, "w") as archive:
            for name, one in changed.items():
                archive.writestr(name, one)
    except Exception:  # noqa: BLE001 - damaged before: pickletools and zipfile raise whatever comes
        file.write_bytes(content)
        return flip(chance, path)
    return None


def _repickled(chance: random.Random, content: bytes) -> bytes:
    """A pickle in which texts or numbers are others. Legacy files of torch hold several, one behind the other."""
    ends, places = 0, []
    while ends < len(content) and len(places) < 10_000:
        try:
            ops = [(op, argument, ends + (at or 0)) for op, argument, at in pickletools.genops(content[ends:])]
        except ValueError:  # what comes behind the pickles
            break
        stops = [at for _, _, at in ops[1:]]
        places += [
            (op.name, argument, at, stop)
            for (op, argument, at), stop in zip(ops, stops, strict=False)
            if op.name in ("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1")
        ]
        ends = ops[-1][2] + 1
    if not places:
        raise ValueError("no pickle")
    chosen = sorted(chance.sample(places, min(len(places), chance.choice((1, 1, 1, 3)))), key=lambda one: -one[2])
    for name, argument, at, stop in chosen:
        new = _text_op(chance, argument) if "UNICODE" in name else _number_op(chance, argument)
        content = content[:at] + new + content[stop:]
    return content


def _text_op(chance: random.Random, old: str) -> bytes:
    new = chance.choice([*NAMES, *HALVES])
    raw = (old + new if chance.random() < 0.3 else new).encode("utf-8", "surrogatepass")
    return b"X" + len(raw).to_bytes(4, "little") + raw


def _number_op(chance: random.Random, old: int) -> bytes:
    new = chance.choice((-1, 0, 1, old + 1, -old, *(1 << bits for bits in (31, 40, 62, 63, 400, 20_000)), -(1 << 63)))
    raw = new.to_bytes((new.bit_length() // 8) + 1, "little", signed=True)
    if len(raw) < 256:
        return b"\x8a" + len(raw).to_bytes(1, "little") + raw
    return b"\x8b" + len(raw).to_bytes(4, "little") + raw


def _of_files(chance: random.Random, path: Path) -> None:
    """A piece of a file's name is another."""
    if path.is_file():
        return flip(chance, path)
    file = chance.choice(files_of(path))
    name = os.fsencode(file.name)
    pieces = re.findall(rb"\d+|[A-Za-z]+|[^A-Za-z\d]+", name)
    pieces[chance.randrange(len(pieces))] = chance.choice(_PIECES)
    new = os.fsdecode(b"".join(pieces)[:255])
    if new not in ("", ".", "..") and not file.with_name(new).exists():
        file.rename(file.with_name(new))
    return None


_PIECES = [
    b"", b"9" * 18, b"9" * 200, b"\xc2\xb2", b"\xd9\xa3", b"-1", b"0", b"\xff", b"\n", b"\x1b[31m", b"[", b"%00",
    b"%2F..",
    b"@", b" ", b".", b"\xed\xa0\x80", b"_micro_step_", b"_layer_name_", b"_forward_input", b"\xe2\x80\xae", b"=1",
]  # fmt: skip
