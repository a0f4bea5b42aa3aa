"""Which tensor of one run is which of the other.

matching.py             what is compared and how it is paired: the user's options, checked
alignment.py            pairs the rows of one rank by key
sequence_alignment.py   pairs calls by order, where keys do not tell
mapping.py              names of the candidate in the reference's words
layouts.py              tensors of the candidate as the reference lays them out: transposed, permuted, reshaped
layout_checks.py        layout rules that do not fit, and those that are missing
renaming.py             the columns of a rank after both
lone_rows.py            what a mapping says that only one side has
own_tensors.py          the parameters and buffers of a run
mapping_draft.py        drafts a mapping: `astray map`
checkpoints.py          names of checkpoints, and their largest differences
joined_runs.py          runs whose micro steps are joined to whole steps
micro_groups.py         which rows of micro steps belong together, and how
joined_rank.py          a rank of joined rows
"""
