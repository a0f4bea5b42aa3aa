"""What two runs were set to differently, before anything is said of their tensors.

`differences` is the entry: it reads the recorded setup (`timelines`), compares modules, optimizers and torch's flags
(`subjects`) and the arguments of calls (`arguments`). `effects` says what each may do to numbers, `folding` makes one
of what is the same in many places, `wording` a sentence. `causes` finds those that could explain a wrong result.
"""
