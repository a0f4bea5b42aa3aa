"""The PyTorch adapter: the only place that imports torch and touches its hooks.

tensors.py     a torch tensor        → what the engine needs to measure it
modules.py     forward calls         → calls, inputs, parameters, outputs
gradients.py   the backward pass     → gradients of the same calls, and of parameters
discovery.py   an unchanged program  → its outermost modules and its steps
"""
