"""What holds of whole runs: in which precision they multiply float32, and a factor that all gradients of a step share.

Reads what both runs were set to, `sources` and the norms of both sides; feeds `errors`. TF32 and its kind round inputs
to fewer digits than their dtype has. That holds for whatever may multiply matrices: the results of linear layers,
convolutions and of code that was not recorded, and not of norms, activations and pooling. A factor comes from a loss
scale, a mean for a sum, or ranks that add up. It is one finding, said where gradients come in from outside; what agrees
after dividing by it agrees.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from astray.comparison.judge import thresholds as t
from astray.comparison.judge.sources import Sources
from astray.comparison.measure.evidence import Evidence
from astray.comparison.rows import Bools, Floats
from astray.comparison.setup.setup_difference import unit_of
from astray.store import RankRun

PLAIN = re.compile(
    r"norm|relu|gelu|silu|tanh|sigmoid|softmax|act|drop|embed|pool|identity|flatten|rotary", re.IGNORECASE
)
"""Classes that multiply no matrices; all others may. Of functions only those that `MULTIPLIES` names do."""

MULTIPLIES = re.compile(r"linear|matmul|mm$|bmm|conv|einsum|attention|lstm|gru|rnn|dot", re.IGNORECASE)
CONVOLVES = re.compile(r"conv", re.IGNORECASE)

FLAGS = {
    "cuda": {"matmul": ("cuda.matmul.fp32_precision",), "conv": ("cudnn.conv.fp32_precision",)},
    "cpu": {"matmul": ("mkldnn.matmul.fp32_precision",), "conv": ("mkldnn.conv.fp32_precision",)},
}


class MultiplyPrecision(NamedTuple):
    """The unit roundoffs of products in float32, in whichever run is coarser; 0 where neither sets one."""

    matmul: float
    conv: float


def find_product_roundoffs(evidence: Evidence) -> MultiplyPrecision:
    """Those that both runs were set to."""
    units = [_units(rows.run) for rows in (evidence.reference, evidence.candidate) if rows.run is not None]
    return MultiplyPrecision(*(max((unit[name] for unit in units), default=0.0) for name in MultiplyPrecision._fields))


def _units(run: RankRun) -> dict[str, float]:
    """In which precision a run multiplies float32, on the device where most of its tensors are."""
    device = run.tensors.coded("device")
    counts = np.bincount(device.codes[device.codes >= 0], minlength=1)
    kind = str(device.values[int(counts.argmax())]).partition(":")[0] if len(device.values) else "cpu"
    said = [row.values for row in run.setup if row.subject == "torch"]
    return {
        name: max((unit_of(values.get(flag)) or 0.0 for values in said for flag in flags), default=0.0)
        for name, flags in FLAGS.get(kind, FLAGS["cpu"]).items()
    }


def product_roundoffs(sources: Sources, units: MultiplyPrecision) -> Floats:
    """For each row the unit roundoff of the products it is made of, 0 where that is its dtype's."""
    found = np.zeros(len(sources.call))
    matmul, conv = units
    if max(units) <= t.FLOAT32:
        return found
    calls = sources.calls
    by_type = []
    for word in sources.run.calls.coded("type").values:
        of_module = 0.0 if PLAIN.search(word) else conv if CONVOLVES.search(word) else matmul
        of_function = 0.0 if not MULTIPLIES.search(word) else conv if CONVOLVES.search(word) else matmul
        by_type.append((of_module, of_function))
    table = np.array([*by_type, (matmul, 0.0)])
    types = np.where(calls.is_parameter | calls.is_optimizer, calls.owner_type, calls.type)
    of_call = np.where(calls.plane == 1, table[types, 1], table[types, 0])
    made = sources.is_result | (sources.has_role("input") & (sources.plane == 0))
    return np.where(made & sources.comparable, np.append(of_call, 0.0)[sources.call], found)


# -- a common factor of gradients --------------------------------------------------------------------------------------


class Scaling(NamedTuple):
    """For each row the factor by which its candidate is divided, 1 for most; and the rows where it comes in."""

    factor: Floats
    entries: Bools

    @property
    def found(self) -> bool:
        return bool(self.entries.any())


def find_scaling(evidence: Evidence, sources: Sources) -> Scaling:
    """Compare the norms of all gradients, step by step."""
    factor = np.ones(len(sources.call))
    entries = np.zeros(len(sources.call), np.bool_)
    gradients = sources.backward & sources.comparable
    outermost = gradients & sources.has_role("input") & (sources.enclosing < 0)
    ratio = _ratios(evidence, gradients)
    for step in np.unique(sources.step[outermost]).tolist():
        here = gradients & (sources.step == step) & ~np.isnan(ratio)
        common = _common(ratio[here])
        begins = here & outermost
        if common is None or not begins.any() or np.any(np.abs(ratio[begins] - common) > abs(common - 1) / 4):
            continue
        factor[here] = common
        entries |= begins
    return Scaling(factor, entries)


def _ratios(evidence: Evidence, rows: Bools) -> Floats:
    """By how much the norms of some rows differ; NaN where they are not known or 0, or no float is that factor."""
    found = np.full(len(rows), np.nan)
    at = np.flatnonzero(rows)
    if len(at):
        reference, candidate = evidence.numbers("l2", at)
        told = (reference > 0) & (candidate > 0)
        ratio = candidate[told] / reference[told]
        found[at[told]] = np.where((ratio > 0) & np.isfinite(ratio), ratio, np.nan)
    return found


def _common(ratios: Floats) -> float | None:
    """The factor that nearly all ratios are; None where they have none in common but one."""
    if not len(ratios):
        return None
    middle = float(np.median(ratios))
    alike = np.abs(ratios / middle - 1) <= t.FACTOR_SPREAD
    return middle if abs(middle - 1) > t.MIN_FACTOR and alike.mean() >= t.FACTOR_SHARE else None
