"""Front doors for users of other tools: the tool's names and defaults, each a thin file over astray.

hooktools/     `Tracer` and `Comparer`
msprobe/       `PrecisionDebugger`, `compare`, `seed_all`
nnstat.py      NNstat's functions, which are those of `astray.state`
saving_hook/   `register_saving_hook`
torch_npu/     `register_hook` and `tools.compare`
"""
