"""The measuring stick for runs that differ honestly: faults in 15 models, beside other dtypes, kernels and devices.

`models` and `training` are the programs, `variants` the ways to run them and the differences between two such ways,
`in_*` the faults. `cases` lists what is compared with what, `recording` records it into a folder, `judging` compares
and scores what a folder holds, `sensitivity` looks for the smallest fault that is named. The command is
`python benchmarks/faults grid`.

Half of the grid is *unseen*: half of the models with every kind of fault, the newest kinds of fault in every model, and
every second control. A change of how runs are judged is made with the seen half only, and reported for both. When the
seen half has nothing left to show, unseen models and kinds become seen, and new ones are written before anyone looks.
"""
