"""What the program is set to, and what is done to gradients before a step.

torch_flags.py       torch itself
attributes.py  modules
clipping.py    what gradients are clipped to
written.py     which gradients somebody wrote to
setup_capture.py    when each is looked at
"""
