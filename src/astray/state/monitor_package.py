"""Follows the weights, gradients and updates of a training, every few steps, for as long as it runs.

`monitor` records them into a run, as any recording is; `series` reads them as lines over steps; `scalars` hands them to
TensorBoard.
"""

from astray.state.monitor import Monitor, ParameterSeries

__all__ = ["Monitor", "ParameterSeries"]
