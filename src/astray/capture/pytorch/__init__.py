"""The PyTorch adapter: the only place that imports torch and touches its hooks.

adapter.py     what the recorder asks of a framework; puts the rooms below in place
tensors.py     a torch tensor → what the engine needs to measure it; shards.py for parts of larger ones
calls/         forward calls: modules, functions, ops, collectives, values the program saves
backward/      the gradients of the same calls, and of parameters
native/        what reads them, in C++ against torch's headers, built on first use
update/        what optimizers do to parameters
setup/         what was set: attributes, flags, what optimizers step with, what gradients are clipped to
compiled/      torch.compile
program/       a program that knows nothing of astray: its models and its steps
experiments/   what users try with a suspect
perturbing/    inputs changed by roundings, to calibrate a comparison
"""
