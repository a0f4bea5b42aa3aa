"""All ranks of two runs, and ranks of one run that should agree.

schedule.py    one rank after another, or in worker processes where that saves time
worker.py      the process that compares ranks for another
rank.py        one rank: pair, judge and blame; the pairs of all ranks in one table
replaying.py   calls that are executed again in both runs, where the verdicts of a rank depend on them
replicas.py    the ranks of one run with each other: `astray compare RUN --replicas`
"""
