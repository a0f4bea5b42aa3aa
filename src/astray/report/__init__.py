"""A Comparison or a Run → text and files.

text.py           the report for a terminal
html.py           the same in colours, for notebooks
listing.py        what one run holds
checkpoints.py    what reports say of checkpoints in place of runs
setup.py          what was set differently
csv.py            `pairs.csv` and `summary.csv`
xlsx.py           a workbook
json.py           one document, for scripts
junit.py          JUnit XML, for continuous integration
atomic_files.py   files that are there in full or not at all
"""
