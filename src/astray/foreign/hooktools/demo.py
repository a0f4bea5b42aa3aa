"""The two YAML files that people of hooktools begin with, every key in its place, to be edited.

What a key means stands beside it. Both can be used as they are, but for the two folders that a comparer compares.
"""

from __future__ import annotations

TRACER = """\
# What a Tracer records: trace = Tracer("tracer_demo.yaml", model)

log_dir: ./tmp                  # files go to log_dir/{tracer_name}_{unixtime}
tracer_name: tracer_demo

trace_mode: 3                   # 0 nothing, 1 forward, 2 backward, 3 both
trace_granularity: 0            # 0 every module, also a loss outside of the model; 1 those of the model
register_hooks: [dump_pt_hook]  # [] traces nothing
only_input: false               # leave out what calls give
only_output: false              # leave out what calls are given
verbose: false                  # tell where files go and how many there are

dump_pt_hook_options:
  hook_specifiy_modules:        # only modules (and functions) of these names; none given are all
    starts_with: []             # such as [h.2.attn]
    regular_expression: []      # such as ['h\\.\\d+\\.mlp']

hacker_non_nn_modules: false    # trace functions too
hacker_options:
  verbose: false                # tell at each untrace how often each function was called
  supported_apis:               # these functions, in groups of any name; leave it out for every function of torch
    functional: [torch.nn.functional.softmax, torch.nn.functional.layer_norm]
    tensor: [torch.matmul, torch.Tensor.add]
"""

COMPARER = """\
# What a Comparer compares: Comparer("comparer_demo.yaml").compare()

compare_mode: 0                 # 0 folders, 1 two files, 2 two lists of files
compare_directory_options:
  compared_directory_1: ./good  # the reference: a log_dir, a run in it, or any folder inside that
  compared_directory_2: ./bad

compare_folder_name: [forward, backward]  # forward, backward, gradient
compare_epochs: -1              # 8; -1 all; [1, 3] these two; "[0,8)" from 0 to 7
compare_steps: -1

evaluation_metrics: [L1, CS]    # L1, AE, MAE, MSE, RMSE, MAPE, CS; the worst are those of the first
filter:
  global_filter: 0              # what is no further off is not shown
  # L1_filter: 1.0e-5           # the same for one metric

only_compare_input: false
only_compare_output: false
compare_by_order: false         # pair calls by their order, whatever their names
top_k: 10
"""

DEMOS = {"tracer": TRACER, "comparer": COMPARER}
