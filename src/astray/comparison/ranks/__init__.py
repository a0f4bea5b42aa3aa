"""All ranks of two runs.

schedule.py    one after another, or in processes of their own where that saves time
rank.py        one rank: pair, judge and blame
schedule.py     the side that asks processes; worker.py: the process
rank.py       the pairs of all ranks in one table
"""
