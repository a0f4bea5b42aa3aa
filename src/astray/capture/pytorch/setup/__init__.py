"""What the program is set to, and what is done to gradients before a step.

setup_capture.py  modules, configurations and optimizers, and when each is looked at
torch_flags.py    torch itself
clipping.py       what gradients are clipped to, and which the program has written to
"""
