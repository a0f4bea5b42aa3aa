"""The first call that is wrong by itself, and what explains it.

first.py          finds the divergences of one rank
culprit.py        the call to blame for a wrong row
sentences.py      why it is blamed, and where to look
weights.py        sentences about a parameter or buffer that differs
clues.py          sentences about what else was seen around a divergence
setup_causes.py   what was set differently, as the cause
detours.py        rows that only one run has because it computed the same in another way
suspects.py       the most surprising calls, whether or not they pass a limit
explanation.py    a surprise in words
"""
