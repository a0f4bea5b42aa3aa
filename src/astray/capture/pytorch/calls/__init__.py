"""Forward calls → records: of modules by hooks, of functions by a function mode, of ops by a dispatch mode.

modules.py       hooks on modules
functions.py     the function mode
ops.py           the dispatch mode
call_capture.py  what these two share: opens a call, takes its inputs and outputs
modes.py         puts modes on torch's stacks and takes them off; modules that leave a fast path because of a mode
sites.py         the sites of functions and ops, which may be one call
wrappers.py      sees through DDP, FSDP and torch.compile, so that sites are named alike
catalogue.py     which functions are recorded
function_names.py  those that compute no numbers
generators.py    which of them may draw random numbers, and the states of the generators that they draw from
collectives.py   which of them are collectives, and when their results may be read
spelling.py      how a function was called in the source: by an operator, or by name
bytecode.py      the instruction at which a frame waits, which spelling.py reads
"""
