"""Does `astray compare` name the call that is wrong? Faults planted in a small GPT, each with its culprit declared.

`model` and `training` are the program, `in_*` the faults in it, `controls` what must give no alarm. `running` records
and compares, `scoring` says how good the answer is. The command is `python benchmarks/faults`.
"""
