"""The PyTorch adapter: the only place that imports torch and touches its hooks.

tensors.py     a torch tensor        → what the engine needs to measure it
modules.py     forward calls         → calls, inputs, parameters, outputs
sites.py       a model as it is now  → a name for each module, with wrappers.py the same in DDP, FSDP or torch.compile
compiled.py    compiled code         → left as it is, and what it hides; with taps.py and operators.py the calls inside
gradients.py   the backward pass     → gradients of the same calls, and of parameters
optimizers.py  steps of optimizers   → what each parameter was given and what became of it, with updates.py
discovery.py   an unchanged program  → its outermost modules, and with pace.py its steps

Besides recording, what users try with a suspect: seeding.py, dropout.py, and elsewhere.py with trips.py.
"""
