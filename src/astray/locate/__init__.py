"""`astray locate`: from a run that is right and a program that may be wrong to a proven culprit.

locate.py     the walk: does the program agree, does it repeat itself, which call, is it proven
programs.py   a program that can be recorded again and again: a script, or anything with `record`
trials.py     experiments on a suspect: its inputs, its results, its parameters from the reference; replay; a swap
located.py    what came of it, as data
report.py     the same as text, and as JSON

Every recording of the walk is a run in its folder, beside what the program printed, and stays there.
"""
