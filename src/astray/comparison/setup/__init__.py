"""What two runs were set to differently, before anything is said of their tensors.

differences.py        the entry: the differences of a rank, and of all ranks
timelines.py          reads what each thing was set to, step by step
subjects.py           compares modules, optimizers, torch's flags and the environment
arguments.py          compares the plain arguments of calls
wording.py            a difference as a sentence
setup_difference.py   the records: a difference, and the raw finding; what each may do to numbers

`blame.setup_causes` finds those that could explain a wrong result.
"""
