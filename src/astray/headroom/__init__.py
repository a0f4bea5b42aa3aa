"""How close the numbers of a run come to trouble, from their statistics alone. `risk.py` is the way in.

observations.py   the rows of a run, one place (site, phase, role, path, dtype) at a time
dtype_limits.py        the limits of each dtype; measures.py: what is left of them; measures.py: whether that shrinks
shares.py         bounds on how many elements are subnormal or flushed; measures.py, motion.py: updates that move
nothing what_if.py        the same numbers in another dtype
risk.py         how bad it is, in a word
"""
