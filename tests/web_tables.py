"""A report of a large comparison, made of columns alone: as many rows as wanted in a second."""

from __future__ import annotations

import base64
import zlib

import numpy as np

from astray.comparison.verdict import LABELS
from astray.store import DictionaryColumn
from astray.web.wire import Column, encode, pack

LAYERS = 12
PARTS = ("attn", "attn.qkv", "attn.proj", "norm", "mlp", "mlp.up", "mlp.act", "mlp.down")
TENSORS = (("input", "0"), ("output", "out"))
STEPS = 20


def big_file(rows: int) -> str:
    """What stands inside of the report: documents and a table of so many rows, deflated and in base64."""
    head = encode({"session": big_session(), "overview": big_overview(rows), "pairs": {}})
    head += b" " * (-(4 + len(head)) % 8)
    packer = zlib.compressobj(1, wbits=-15)
    parts = [packer.compress(len(head).to_bytes(4, "little") + head), packer.compress(pack(big_table(rows)))]
    return base64.b64encode(b"".join([*parts, packer.flush()])).decode("ascii")


def big_table(rows: int) -> dict[str, Column]:
    """A comparison of a transformer in which errors grow from the middle on."""
    random = np.random.default_rng(0)
    row = np.arange(rows)
    call = row // len(TENSORS)
    each = max(1, -(-int(call[-1] + 1) // STEPS))  # calls of a step
    step, place = call // each, call % each
    sites = [f"layers.{layer}.{part}" for layer in range(LAYERS) for part in PARTS]
    site = place % len(sites)
    wrong = row > rows // 2
    error = np.where(wrong, 10.0 ** random.uniform(-6, -1, rows), 0.0)
    verdict = np.where(error > 1e-3, 3, np.where(error > 1e-5, 2, np.where(error > 0, 1, 0)))
    nothing = np.full(rows, np.nan)

    def words(codes: np.ndarray, values: list[str]) -> DictionaryColumn[str]:
        return DictionaryColumn(codes.astype(np.int32), values)

    same = np.zeros(rows, np.int64)
    return {
        "rank": same, "step": step, "micro": same, "call": place // len(sites), "recompute": same.astype(np.bool_),
        "site": words(site, sites), "type": words(site % len(PARTS), [part.split(".")[-1].title() for part in PARTS]),
        "kind": words(same, ["module"]), "phase": words(same, ["forward"]),
        "role": words(row % 2, [role for role, _ in TENSORS]), "path": words(row % 2, [path for _, path in TENSORS]),
        "verdict": words(verdict, list(LABELS)), "reason": words(same - 1, []), "error": error,
        "limit": np.where(wrong, 1e-5, np.nan), "cosine": 1 - error**2, "max_abs": error * 3, "relative_l2": error,
        "dtype_a": words(same, ["float32"]), "dtype_b": words(same, ["float32"]),
        "shape_a": words(same, ["8x512x768"]), "shape_b": words(same, ["8x512x768"]),
        "seq_a": call, "seq_b": call, "group": call, "parent": same - 1, "empty": nothing,
    }  # fmt: skip


def big_session() -> dict[str, object]:
    """Two runs that were compared."""
    run = {"path": "runs/a", "facts": [], "problems": [], "steps": list(range(STEPS)), "ranks": [0]}
    runs = [run | {"id": "0", "label": "a"}, run | {"id": "1", "label": "b"}]
    job = {"state": "done", "done": 0, "total": 0, "text": ""}
    return {"version": "0", "mode": "file", "kind": "comparison", "runs": runs, "reference": "0", "candidate": "1",
            "options": {}, "job": job}  # fmt: skip


def big_overview(rows: int) -> dict[str, object]:
    """An answer without a first divergence."""
    return {"agree": False, "sentence": f"{rows:,} rows", "first": None, "counts": {}, "notes": [], "problems": []}
