"""What every call of a recording goes through, as C++ that knows no framework. Each adapter compiles it for itself.

build.py               compiles an adapter's module on first use, and loads it
core.pyi               what the headers here look like from Python
python.h               calls into Python, and Python types around C++ objects
sites.h                sites of calls, and calls that have started
stacks.h               Python stacks, each with an id
rows.h                 the rows of tensors, and what was measured for them
observer.h             what observes the tensors of a recording
memories.h             what was measured of each memory, and which value it holds
measuring_observer.h   records plain tensors: what all frameworks share
observer_bindings.h    the same for Python
calls.h                numbers calls, and writes their rows
call_gradients.h       the gradients of one call
structure.h            tensors among arguments and results
objects.h              tensors in the attributes of an object
finalizer.h            calls a function when an object is destroyed, and loses no exception
"""
