"""Re-exports `Monitor`, which records weights, gradients and updates of a training every few steps."""

from astray.state.monitor import Monitor, ParameterSeries

__all__ = ["Monitor", "ParameterSeries"]
