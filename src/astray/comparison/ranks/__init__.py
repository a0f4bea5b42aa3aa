"""All ranks of two runs, and ranks of one run that should agree.

schedule.py   one rank after another, or in worker processes where that saves time
worker.py     the process that compares ranks for another
rank.py       one rank: pair, judge and blame; the pairs of all ranks in one table
replicas.py   the ranks of one run with each other: `astray compare RUN --replicas`
"""
