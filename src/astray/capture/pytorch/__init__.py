"""The PyTorch adapter: the only place that imports torch and touches its hooks.

adapter.py           what the recorder calls; puts the modules below in place
tensors.py           a torch tensor → what the engine needs to measure it
shards.py            which part of a distributed tensor this process holds
hooks.py             the base of our hooks, and copies of a model without them
patches.py           the functions of torch that are replaced while a recording runs
kept_tensors.py      the values that a run has kept → torch tensors
torch_code.py        which code is torch's own machinery
discovery.py         the models of a program that knows nothing of astray, and scalers that skip a step
gradients.py         the gradients of calls and of parameters
optimizer_steps.py   what optimizers do to parameters
parameter_update.py  the same for one parameter in one step
setup_capture.py     what modules, configurations and optimizers are set to
torch_flags.py       what torch itself is set to
_torch.pyi           what native/ looks like from Python
calls/               forward calls: modules, functions, ops, collectives
native/              what every call, tensor and gradient goes through, in C++, built on first use
compiled/            torch.compile
experiments/         what users try with a suspect: swaps, grafts, perturbed inputs
"""
