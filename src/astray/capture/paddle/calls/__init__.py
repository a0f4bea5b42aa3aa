"""Forward calls → records: of layers by hooks, of functions by replacing them.

layers.py           hooks on layers
functions.py        functions and operators, which are replaced; writes past version counters
catalogue.py        which functions are recorded, and what they write
collectives.py      collectives, and when their results may be read
static_programs.py  code that `to_static` runs as one program is left alone
wrappers.py         sees through DataParallel and the wrappers of fleet, so that sites are named alike
flattening.py       tensors among arguments and results
"""
