"""The PyTorch adapter: the only place that imports torch and touches its hooks.

adapter.py           what the recorder calls; puts the modules below in place
tensors.py           a torch tensor → what the engine needs to measure it
shards.py            where the local part of a distributed tensor sits in the whole
hooks.py             the base of our hooks, and functions of torch with something around them
torch_code.py        which code is torch's own machinery
model_discovery.py   the models of a program that knows nothing of astray
step_detection.py    when its steps end
gradients.py         the gradients of calls and of parameters
optimizer_steps.py   what optimizers do to parameters
parameter_update.py  the same for one parameter in one step
_torch.pyi           what native/ looks like from Python
calls/               forward calls: modules, functions, ops, collectives
native/              what every call, tensor and gradient goes through, in C++, built on first use
setup/               what was set: attributes, flags, what optimizers step with, what gradients are clipped to
compiled/            torch.compile
experiments/         what users try with a suspect, and perturbed inputs
"""
