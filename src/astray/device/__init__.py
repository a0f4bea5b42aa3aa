"""Measures tensors on the device that holds them, without waiting for it.

devices.py          the measurer of every device; the public class
cuda_measurer.py    a CUDA device, with our kernels (`triton_kernels.py`, laid out by `layout.py`, run by `launcher.py`)
torch_kernels.py    all other devices, in plain torch operations
tickets.py          the tickets of measurements under way, and the row that a kernel leaves for each
staging.py          values copied to the host while the program goes on, over `streams.py`
moments.py          moments of many tensors at once (`triton_moments.py`), for `state/`
"""
