"""What users try with a suspect, and perturbed inputs to calibrate a comparison.

determinism.py   no dropout, the same seed, the same bits
perturbation.py  inputs changed by a rounding
grafting.py      values of another run in the place of the program's; reference_values.py reads them,
                 applied_graft.py counts them, grafted_tensors.py puts them there
swapping.py      what runs elsewhere: a module, a function or op in it, a callable of the program
program_swaps.py the same in a script that knows nothing of it (`astray run --swap`)

A swap in parts: swap_words.py reads its words, destination.py knows where a call runs instead, round_trip.py moves its
tensors there and back; swapped_calls.py and swapped_functions.py lie in the place of what is swapped,
program_callables.py finds callables by their names, active_swaps.py tells recordings.
"""
