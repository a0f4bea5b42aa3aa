"""What users are given: a `Run` and a `Comparison`, which can be asked for what the rooms above their data make of it.

run.py           `astray.open`: a run that says where its NaN come from, and how close it is to trouble
comparison.py    `astray.compare`: a comparison that is printed, shown in a notebook, and written to files

astray itself works on what these two add to, `store.RunData` and `comparison.ComparisonData`. They are two modules,
for loading what compares takes as long as loading what reads a run.
"""
