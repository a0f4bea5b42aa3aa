"""The public names of other tools, with their arguments and defaults; each module only exports what `foreign/` defines.

hooktools.py     `Tracer` and `Comparer`
msprobe.py       `PrecisionDebugger`, `compare`, `seed_all`
nnstat.py        NNstat's functions, in terms of `astray.state`
saving_hook.py   `register_saving_hook`
torch_npu/       `register_hook`, and `tools.compare`

`python -m astray.compat.hooktools`, `.msprobe` and `.saving_hook` are the commands of those tools.
"""
