"""The state of a model (weights, gradients, optimizer states, activations) as an algebra with statistics.

    weight = astray.state.from_weight(model)
    before = weight.clone()
    ...
    (weight - before).describe(lw=True)

state_dict.py   `StateDict`: mapping.py with the methods of algebra.py, reductions.py and plots.py; its files
mapping.py      the mapping from names to values, which may be loaded or computed on demand; tensors in bounded blocks
algebra.py      operators and functions of torch, one name at a time
reductions.py   statistics: of all elements, of each parameter, of groups
describe.py     the table of a state
plots.py        histograms, distribution functions, heat maps, lines by layer
naming.py       patterns, groups, the parts of names that wrappers add; warnings that point at the user's line
measuring.py    values → moments, on a CPU, on a device, over processes
differences.py  two states compared: a table, the cosine, the trust ratio, the noise scale of gradients
sources.py      where states come from: models, optimizers, checkpoints, activations
monitor.py      weights, gradients and updates every few steps, as a run
updates/        was each weight updated as its optimizer says?

`Monitor` and `check_updates` are loaded when they are first used, since they import the recorder, whose native code is
built on first use.
"""

from typing import TYPE_CHECKING

from astray.state.describe import StatisticsTable
from astray.state.differences import NoiseScale, cosine, diff, gradient_noise_scale, trust_ratio
from astray.state.reductions import register_reduction
from astray.state.sources import (
    ActivationGradients,
    Activations,
    from_activation,
    from_activation_grad,
    from_grad,
    from_optimizer_state,
    from_state_dict,
    from_together,
    from_weight,
)
from astray.state.state_dict import StateDict, load_state

if TYPE_CHECKING:
    from astray.state.monitor import Monitor
    from astray.state.updates import check_updates

__all__ = [
    "ActivationGradients",
    "Activations",
    "Monitor",
    "NoiseScale",
    "StateDict",
    "StatisticsTable",
    "check_updates",
    "cosine",
    "diff",
    "from_activation",
    "from_activation_grad",
    "from_grad",
    "from_optimizer_state",
    "from_state_dict",
    "from_together",
    "from_weight",
    "gradient_noise_scale",
    "load_state",
    "register_reduction",
    "trust_ratio",
]

_MODULES = {"Monitor": "astray.state.monitor", "check_updates": "astray.state.updates"}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"astray.state has no {name!r}. It offers {', '.join(__all__)}.")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
