"""One graft of a recording: what it takes from the run at each call, and what became of that.

`grafting` asks it. What could not be grafted is counted with its reason, and written into the run at the end.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from astray.capture.engine import Engine
from astray.capture.graft_words import SUBJECT, Graft
from astray.capture.pytorch.experiments.grafted_tensors import (
    check_fits,
    check_replaceable,
    dtype_name,
    have_same_bits,
)
from astray.capture.pytorch.experiments.reference_values import LEVEL_OF, CallKey, ReferenceValues, Rows
from astray.capture.pytorch.native.core import OpenCall
from astray.errors import RecordError
from astray.log import logger
from astray.process import relative_to_cwd
from astray.wording import counted

_NOT_MADE = "no such call was made and seen"
_NOT_FOUND = "the call had no such tensor, or had it inside an object"


class AppliedGraft:
    """One graft: what it takes, and what became of that."""

    def __init__(self, engine: Engine, graft: Graft, ranks: dict[str, Any]) -> None:
        self._engine = engine
        self._graft = graft
        self._reference = ReferenceValues(graft, ranks[graft.run])
        self._step = -1
        self._rows: dict[CallKey, Rows] = {}
        self._seen: set[CallKey] = set()  # calls of this step
        self._taken: set[int] = set()  # rows of this step
        self._refused: Counter[str] = Counter()
        self._unreached: Counter[str] = Counter()
        self.tensors = self.differed = 0
        self._check_level()

    def _check_level(self) -> None:
        """Raises where none of the calls that are meant is seen by this recording."""
        level = self._engine.settings.level
        unseen = {LEVEL_OF[kind] for kind in self._reference.kinds} - set(level)
        if not unseen or unseen < {LEVEL_OF[kind] for kind in self._reference.kinds}:
            return
        raise RecordError(
            f"{self._graft.where.partition('@')[0]} is seen at level {', '.join(sorted(unseen))}, and this recording "
            f"observes level {', '.join(level)}. Give both: --level {','.join([*level, *sorted(unseen)])}."
        )

    def rows_of(self, call: OpenCall) -> Rows:
        """What it takes at a call. A recomputation takes the same as the call, where the run did not compute again."""
        if self._step != call.step:
            self._step, self._rows = call.step, self._reference.of_step(call.step)
        key = CallKey(call.site.name, call.micro, call.number, call.phase, call.recompute)
        found = self._rows.get(key)
        if found is None and call.recompute:
            found = self._rows.get(key._replace(recompute=False))
        self._seen.add(key)
        return found or {}

    def values(self, row: int, tensor: Tensor, *, counts: bool) -> Tensor | None:
        """The run's values like a tensor of the program: its dtype, device and strides. None for the same bits.

        counts: whether it is one more that was grafted. Raises CannotGraftError or NotKeptError.
        """
        self._taken.add(row)
        check_replaceable(tensor)
        values = self._reference.value(row)
        check_fits(values, tensor)
        with torch.no_grad():
            made = torch.empty_like(tensor, requires_grad=False).copy_(values)
            differs = not have_same_bits(made, tensor)
        if counts:
            self._count(differs)
            if values.dtype != tensor.dtype:
                cast = f"cast from {dtype_name(values.dtype)} to {dtype_name(tensor.dtype)}"
                self._engine.missed(f"the bits of {self._graft.where} in the run", cast)
        return made if differs else None

    def _count(self, differs: bool) -> None:
        if not self.tensors:
            self._engine.setup.note(self._engine.step, SUBJECT, self._graft.where, {"from": self._graft.run})
        self.tensors += 1
        self.differed += differs

    def pass_over(self, rows: list[int]) -> None:
        """These are not to be grafted, or an earlier graft has them."""
        self._taken.update(rows)

    def refused(self, row: int, why: str) -> None:
        self._taken.add(row)
        self._refused[why] += 1
        self._engine.missed(f"the graft of {self._graft.where}", why)

    def end_step(self) -> None:
        """Counts what no call of this step has taken."""
        step = self._engine.step
        if self._step != step:
            self._rows = self._reference.of_step(step) if step in self._engine.settings.steps else {}
        for key, rows in self._rows.items():
            left = 0 if key.recompute else len({row for each in rows.values() for row in each} - self._taken)
            if left:
                why = _NOT_FOUND if key in self._seen else _NOT_MADE
                self._engine.missed(f"the graft of {self._graft.where}", why, left)
                self._unreached[why] += left
        self._taken.clear()
        self._seen.clear()
        self._step, self._rows = -1, {}

    def finish(self) -> None:
        if self._step == self._engine.step:  # a step that was begun
            self.end_step()
        counts = {"tensors": self.tensors, "differed": self.differed, "unreached": self._unreached.total()}
        self._engine.setup.note(self._engine.step, SUBJECT, self._graft.where, {"from": self._graft.run, **counts})
        text = self._text()
        self._engine.remarks.append(text)
        if not self.tensors:
            logger.warning("astray: %s", text)

    def _text(self) -> str:
        """What became of it, in a sentence."""
        graft = f"{relative_to_cwd(Path(self._graft.run))}, {self._graft.where}"
        if not self.tensors:
            why = [*self._refused, *self._unreached, "no step that it has was recorded"][0]
            return f"nothing was grafted from {graft}: {why}."
        parts = [f"grafted {counted(self.tensors, 'tensor')} from {graft}; {self._differing()}"]
        left = (self._refused + self._unreached).most_common()
        parts += [f"{counted(count, 'tensor')} could not be grafted: {why}" for why, count in left]
        return "; ".join(parts) + "."

    def _differing(self) -> str:
        if not self.differed:
            return "the program had computed the same bits"
        return f"{self.differed:,} had other bits than the program's own"
