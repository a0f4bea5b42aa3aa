"""Builds runs in memory: row by row for the small cases, and from a two-layer network in numpy for whole programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from astray.part import Part
from astray.records import Blob, Call, Frame, Tensor
from astray.results.run import Run
from astray.stats.kernels import Strided, measure, sample_positions
from astray.store import DictionaryColumn, End, RankRun, RunInfo, Table

WORDS_OF_CALL = {"kind", "site", "type", "phase", "args"}
WORDS_OF_TENSOR = {"role", "path", "dtype", "shape", "stride", "device", "placement", "note"}
MEASURES = ("min", "max", "mean", "std", "l2", "absmax", "first_bad_value")
COUNTS = ("zeros", "nan", "inf", "count", "first_bad")


class Rank:
    """The rows of one rank, and the source that `RankRun` reads them from."""

    def __init__(self, keep: set[str]) -> None:
        self.keep = keep
        self.end: End | None = End(complete=True)
        self.problems: list[str] = []
        self.call_problems: list[str] = []
        self.unreadable: set[int] = set()
        self._calls: list[Call] = []
        self._tensors: list[Tensor] = []
        self._values: dict[int, np.ndarray] = {}
        self._stacks: list[list[Frame]] = []

    def call(self, site: str, type: str = "Linear", **rest: Any) -> int:
        """Add a forward call of a module, unless `rest` says otherwise; gives its number."""
        seq = rest.pop("seq", len(self._calls))
        fields = {"step": 0, "micro": 0, "kind": "module", "call": 0, "phase": "forward"} | rest
        self._calls.append(Call(seq=seq, site=site, type=type, **fields))
        return seq

    def tensor(self, seq: int, role: str, path: str, array: Any, dtype: str | None = None, **rest: Any) -> None:
        """Add a tensor, measured as `keep` says; with `part`, only the values of that slice are kept."""
        array = np.ascontiguousarray(array)
        memory = Strided.from_numpy(array, dtype)
        found = measure(memory)
        keep, part = rest.pop("keep", self.keep), rest.pop("part", None)
        if keep & {"tensors", "sample"}:
            row = len(self._tensors)
            kept = np.ascontiguousarray(array if part is None else Part.parse(part).cut(array))
            sampled = None if "tensors" in keep else sample_positions(kept.size, 4)
            self._values[row] = kept if sampled is None else kept.reshape(-1)[sampled]
            place = 4096 * row  # each has its own, as on a disk
            rest["blob"] = Blob(0, place, self._values[row].nbytes, None if sampled is None else len(sampled), part)
        self._tensors.append(
            Tensor(
                seq, role, path, memory.dtype, memory.shape, memory.stride, "cpu", False,
                found.statistics if "stats" in keep else None,
                found.fingerprint if "fingerprint" in keep else None,
                **rest,
            )
        )  # fmt: skip

    def stacked(self, *frames: Frame) -> int:
        """Add a stack, innermost frame first; gives its number."""
        self._stacks.append(list(frames))
        return len(self._stacks) - 1

    def calls(self) -> tuple[Table, list[str]]:
        rows = {name: [getattr(call, name) for call in self._calls] for name in Call._fields}
        columns: dict[str, Any] = {
            name: DictionaryColumn.of(cells)
            if name in WORDS_OF_CALL
            else np.array([_or_null(cell) for cell in cells], np.int64)
            for name, cells in rows.items()
        }
        columns["recompute"] = np.array(rows["recompute"], np.bool_)
        return Table(columns), self.call_problems

    def tensors(self) -> tuple[Table, list[str]]:
        rows = self._tensors
        columns: dict[str, Any] = {"seq": np.array([row.seq for row in rows], np.int64)}
        columns |= {name: DictionaryColumn.of([getattr(row, name) for row in rows]) for name in WORDS_OF_TENSOR}
        columns["requires_grad"] = np.array([row.requires_grad for row in rows], np.bool_)
        for names, kind, null in ((MEASURES, np.float64, np.nan), (COUNTS, np.int64, -1)):
            for name in names:
                cells = [None if row.statistics is None else getattr(row.statistics, name) for row in rows]
                columns[name] = np.array([_or_null(cell, null) for cell in cells], kind)
        columns["fingerprint"] = np.array([row.fingerprint or 0 for row in rows], np.uint64)
        for place, name in enumerate(("blob_file", "blob_offset", "blob_bytes", "sampled")):
            cells = [None if row.blob is None else row.blob[place] for row in rows]
            columns[name] = np.array([_or_null(cell) for cell in cells], np.int64)
        columns["part"] = DictionaryColumn.of([None if row.blob is None else row.blob.part for row in rows])
        columns["value"] = np.array([_or_null(row.value) for row in rows], np.int64)
        known = np.array([row.fingerprint is not None for row in rows], np.bool_)
        return Table(columns, {"fingerprint": known}), []

    def stack(self, id: int) -> list[Frame]:
        return self._stacks[id] if 0 <= id < len(self._stacks) else []

    def values(self, tensors: Table, row: int) -> np.ndarray | None:
        from astray.errors import RunError

        if row in self.unreadable:
            raise RunError("The file is not there.")
        return self._values[row].reshape(-1).view(np.uint8) if row in self._values else None


def _or_null(cell: Any, null: float = -1) -> Any:
    return null if cell is None else cell


class Builder:
    """A run to be: add rows to `rank(n)` (or straight to the builder, for rank 0), then ask for `run`."""

    def __init__(self, path: str = "runs/good", keep: str = "stats,fingerprint", world_size: int = 1) -> None:
        self.path = path
        self.keep = set(keep.split(","))
        self.ranks: dict[int, Rank] = {}
        self.world_size = world_size

    def rank(self, number: int = 0) -> Rank:
        return self.ranks.setdefault(number, Rank(self.keep))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rank(), name)

    @property
    def run(self) -> Run:
        self.rank(min(self.ranks, default=0))
        info = RunInfo(astray="0", created="", world_size=self.world_size)
        return Run(Path(self.path), info, {number: RankRun(number, rank) for number, rank in self.ranks.items()})


@np.errstate(all="ignore")  # a fault may well be infinite
def product(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The product of two float32 matrices, rounded once: the same bits on every machine, whatever its kernels."""
    return (one.astype(np.float64) @ other.astype(np.float64)).astype(np.float32)


def linear_program(builder: Builder, steps: int = 3, rank: int = 0, **fault: Any) -> Run:
    """Train `out = x + proj(relu(fc(x)))` for some steps, recording every module forward and backward.

    A fault has a name and a value: `data`, `init`, `proj` (wrong result), `between` and `residual` (wrong code
    between the modules), `loss` (wrong gradient from outside), `weight_gradient`, `rate` (wrong update). `at` is the
    step it starts in.
    """
    at = fault.pop("at", 1)
    random = np.random.default_rng(0)
    rows = builder.rank(rank)
    script = Frame("train.py", 5, "<module>", "net(x).backward()")
    outer = Frame("net.py", 12, "Net.forward", "return x + self.mlp(x)")
    inner = Frame("net.py", 7, "MLP.forward", "return self.proj(self.act(self.fc(x)))")
    top, mlp, deep = rows.stacked(script), rows.stacked(outer, script), rows.stacked(inner, outer, script)
    weights = {name: (random.normal(size=(8, 8)) / 3).astype(np.float32) for name in ("fc", "proj")}
    weights["fc"] *= np.float32(fault.get("init", 1))
    for step in range(steps):
        on = {name: value for name, value in fault.items() if step >= at}
        x = random.normal(size=(4, 8)).astype(np.float32) * np.float32(on.get("data", 1))
        root = rows.call("<root>", "Net", step=step, stack=top)
        rows.tensor(root, "input", "0", x)
        body = rows.call("mlp", "MLP", step=step, parent=root, stack=mlp)
        rows.tensor(body, "input", "0", x)

        def layer(name: str, type: str, given: np.ndarray, made: np.ndarray, step: int = step, body: int = body) -> int:
            seq = rows.call(f"mlp.{name}", type, step=step, parent=body, stack=deep, args=fault.get(f"{name}_args"))
            rows.tensor(seq, "input", "0", given)
            if name in weights:
                rows.tensor(seq, "parameter", "weight", weights[name])
            rows.tensor(seq, "output", "out", made)
            return seq

        hidden = product(x, weights["fc"])
        fc = layer("fc", "Linear", x, hidden)
        active = np.maximum(hidden, 0)
        act = layer("act", "ReLU", hidden, active)
        given = active * np.float32(on.get("between", 1))
        made = product(given, weights["proj"]) * np.float32(on.get("proj", 1))
        proj = layer("proj", "Linear", given, made)
        rows.tensor(body, "output", "out", made)
        out = x + made * np.float32(on.get("residual", 1))
        rows.tensor(root, "output", "out", out)

        def backward(seq: int, site: str, type: str, stack: int = deep, step: int = step) -> int:
            return rows.call(site, type, step=step, phase="backward", parent=seq, stack=stack)

        gradient = (out * np.float32(2 / out.size) * np.float32(on.get("loss", 1))).astype(np.float32)
        back_root = backward(root, "<root>", "Net", top)
        rows.tensor(back_root, "input", "out", gradient)
        back_mlp = backward(body, "mlp", "MLP", mlp)
        rows.tensor(back_mlp, "input", "out", gradient)
        sent = gradient
        for name, seq, seen in (("proj", proj, given), ("act", act, hidden), ("fc", fc, x)):
            back = backward(seq, f"mlp.{name}", "ReLU" if name == "act" else "Linear")
            rows.tensor(back, "input", "out", sent)
            if name in weights:
                own = product(seen.T, sent) * np.float32(on.get("weight_gradient", 1) if name == "proj" else 1)
                event = rows.call(f"mlp.{name}.weight", "Parameter", step=step, kind="parameter", phase="backward")
                rows.tensor(event, "gradient", "grad", own)
                sent = product(sent, weights[name].T)
                weights[name] = weights[name] - np.float32(0.1 * on.get("rate", 1)) * own
            else:
                sent = sent * (seen > 0)
            rows.tensor(back, "output", "0", sent)
        rows.tensor(back_mlp, "output", "0", sent)
    return builder.run
