"""Forward calls → records: of modules by hooks, of functions and ops by modes, of what a program saves itself.

modules.py        hooks on modules; sites.py and wrappers.py name them, fsdp.py and fast_paths.py know difficult ones
functions.py      a function mode; catalogue.py says which functions, collectives.py when their results are there
ops.py            a dispatch mode
call_capture.py         what these two share; places.py finds the enclosing module, capture/pytorch/torch_code.py
whose code it is modes.py          puts modes on torch's stacks and takes them off
losses.py         the labels of losses, where no functions are recorded
capture/pytorch/adapter.py          what a program hands over itself
"""
