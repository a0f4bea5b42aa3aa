"""The state of a model (weights, gradients, optimizer states, activations) as an algebra with statistics.

    weight = astray.from_weight(model)
    before = weight.clone()
    ...
    (weight - before).describe(lw=True)

state_dict.py   `StateDict`; base.py the mapping, values.py lazy values, naming.py patterns and groups
algebra.py      operators and functions of torch, over mapped.py
reductions.py   statistics, by formulas.py from a measurement.py; describe.py prints them, table.py lays them out
measuring.py    tensors → measurements: the kernels of `stats`, on_device.py, sharded.py
differences.py  two states beside each other, over pairs.py; ratios.py; noise.py
sources.py      where states come from: models, optimizers; activations.py; files.py; wrappers.py
plots.py        histograms and the like
"""

from astray.state.describe import StatisticsTable
from astray.state.differences import NoiseScale, cosine, diff, gradient_noise_scale
from astray.state.files import load_state
from astray.state.ratios import trust_ratio
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
from astray.state.state_dict import StateDict

__all__ = [
    "ActivationGradients",
    "Activations",
    "NoiseScale",
    "StateDict",
    "StatisticsTable",
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
