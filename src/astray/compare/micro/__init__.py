"""`--micro joined`: runs that cut a batch into different numbers of micro steps, compared as if each step had been one.

batches.py     two runs → two runs of joined ranks, and a note where it looks as if that were wanted
groups.py      which rows of the micro steps make up one row of the step, and how
cuts.py        along which dimension the batch was cut, by the shapes of both runs
joining.py     the tables of a joined rank; joined.py: the rank itself
merging.py     statistics and contrasts of parts → those of the whole
pieces.py      compares values part by part
clues.py       in which micro step it is, and whether it is a mere factor
"""
