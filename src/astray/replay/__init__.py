"""`astray replay`: recorded calls of a PyTorch run, executed again in float64 and in their own dtype.

    run.replay()["h.2.mlp.proj/linear"]

replay.py       the function: every call of a run that can be replayed, judged, the worst first
calls.py        a call of the tables: its callable, its arguments, what it gave, the gradients that passed through it
functions.py    which functions a run may name, and nothing else of torch
arguments.py    the arguments of a call, out of its skeleton and the kept tensors
modules.py      leaf modules of torch.nn, out of their recorded settings and parameters
exact.py        executes a call in one way: in float64, in its own dtype, with inputs rounded otherwise
call_judgement.py  one call: which ways it is executed in, until its results are explained or stand out
judging.py      how far a result is off, in ulps and in tiles, and whether rounding explains it
export.py       one call as a script and a file of tensors; scripted_call.py: what they say of it
script.py       the text of such a script; source.py: the call as Python; script_parts.py: what all scripts have
torch_settings.py  statements that set torch as it was
report.py       the table, one call in detail, JSON

A run is untrusted: its names lead to functions that compute and to nothing else, and what would take more memory than
the recorded tensors do is not executed. torch is imported when a run is replayed.
"""
