"""A running program → records. The engine knows no framework; each framework has an adapter in a folder of its own.

recorder.py           a recording: start, step, stop
settings.py           what is recorded; config_file.py, selection.py and function_list.py are parts of it
graft_words.py        what of another run takes the place of the program's values, in words
adapters.py           what the recorder needs of a framework, and which adapter a model has
engine.py             which calls are recorded, and steps, pauses and the end
observer.py           the tensors of calls; measurement_cache.py, nonfinite_values.py
sites.py              names of modules and of functions in them; optimizer_sites.py those of optimizers
stacks.py             where in the program a call was made
structure.py          tensors among nested arguments and results
saved_values.py       what a program saves by itself
step_ends.py          where steps end, and what models are called, in a program that does not say so
setup_notes.py        what the program is set to; setup_log.py, module_settings.py, clipping.py
patched_function.py   functions of a framework that are replaced meanwhile
copies.py             copies of a recorded model take no hooks along
imports.py            the moment at which a program imports a framework; children.py its child processes
native/               what every call goes through, in C++ that knows no framework
pytorch/, paddle/     the adapters
"""
