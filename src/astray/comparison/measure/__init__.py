"""How far apart the two sides of a pair are, by the best that both sides kept.

evidence.py         what there is to judge a pair by, and which values both sides kept
measurements.py     what that shows: by statistics, or by kept values
metrics.py          what is measured, by name, with its formula
custom_metrics.py   metrics that are asked for by name, and the user's own
pieces.py           tensors that lie in pieces, cut differently on each side
"""
