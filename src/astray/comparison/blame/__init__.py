"""The first call that is wrong by itself, and what explains it.

first.py          finds the divergences of one rank
clues.py          sentences about what else was seen around one
weights.py        sentences about a parameter or buffer that differs
setup_causes.py   what was set differently, as the cause
detours.py        rows that only one run has because it computed the same in another way
suspects.py       the most surprising calls, whether or not they pass a limit
explanation.py    a surprise in words
"""
