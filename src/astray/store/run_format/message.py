"""A record batch as a message of an Arrow IPC stream: its description, and the buffers behind it.

`ipc.py` reads what this writes. The description is a FlatBuffer whose tables can always lie in the same places, so it
is one `struct` here: a batch takes microseconds, and its buffers go to the file from where they are.

The layout: https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from astray.store.run_format.cells import Buffer, Encoded
from astray.store.run_format.ipc import CONTINUES, RECORD_BATCH

END = struct.pack("<II", CONTINUES, 0)
"""The mark that a stream ends."""

_VERSION = 4  # how Arrow counts the fifth version of its metadata
_OF_A_LIST = 4  # buffers: its items are a column inside of it
_PADDING = bytes(8)  # buffers begin at multiples of eight bytes

# Places are counted from the start of the description. A table begins with the way back to its list of fields: the
# size of the list, that of the table, and where in the table each field is. References count from where they stand.
_HEAD = struct.Struct(
    "<II"  # before it: the mark of a message, and how long the description is
    "I"  # 0: a reference to the message
    "6H"  # 4: the fields of the message: version, kind of header, header, bytes of the body
    "i I q h B x"  # 16: the message: way back, header, bytes of the body, version, kind of header
    "5H 2x"  # 36: the fields of the batch: rows, columns, buffers
    "i I q I"  # 48: the batch: way back, columns, rows, buffers
    "I"  # 68: how many columns; they follow at 72, each as (rows, nulls)
)
_MESSAGE_FIELDS = (12, 20, 16, 18, 4, 8)
_BATCH_FIELDS = (10, 20, 8, 4, 16)


def record_batch(rows: int, columns: Sequence[Encoded]) -> list[Buffer]:
    """The bytes of a batch, as pieces that follow one another in the file."""
    counts: list[int] = []
    places: list[int] = []
    pieces: list[Buffer] = []
    end = 0
    for nulls, buffers in columns:
        counts += (rows, nulls)
        if len(buffers) == _OF_A_LIST:
            counts += (len(buffers[-1]) // 8, 0)
        for buffer in buffers:
            size = len(buffer)
            places += (end, size)
            if size:
                pieces += (buffer, _PADDING[: -size % 8])
                end += size + -size % 8
    return [_description(rows, counts, places, end), *pieces]


def _description(rows: int, counts: list[int], places: list[int], body: int) -> bytes:
    columns = struct.pack(f"<{len(counts)}q", *counts)
    buffers = struct.pack(f"<4xI{len(places)}q", len(places) // 2, *places)
    head = _HEAD.pack(
        *(CONTINUES, _HEAD.size - 8 + len(columns) + len(buffers)),
        *(16, *_MESSAGE_FIELDS),
        *(16 - 4, 48 - 20, body, _VERSION, RECORD_BATCH),
        *_BATCH_FIELDS,
        *(48 - 36, 68 - 52, rows, 72 + len(columns) + 4 - 64),
        len(counts) // 2,
    )  # fmt: skip
    return head + columns + buffers
