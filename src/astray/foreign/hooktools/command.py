"""The command `python -m astray.compat.hooktools`: writes the two example YAML files, and compares by such a file.

`DEMOS` has the files that users of hooktools begin with: every key in its place, with its meaning beside it. Both can
be used as they are, except for the two folders that a comparer compares.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from astray.errors import AstrayError, UsageError
from astray.foreign.hooktools.comparer import Comparer
from astray.formatting.terminal import COULD_NOT, print_note, print_report

DESCRIPTION = (
    "`python -m astray.compat.hooktools demo tracer` writes tracer_demo.yaml; `… compare FILE` compares by such a file."
)

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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0, or 2 when it could not do its work."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        options.work(options)
    except (AstrayError, OSError) as error:
        print_note(f"{parser.prog}: {error}")
        return COULD_NOT
    return 0


def _demo(options: argparse.Namespace) -> None:
    file = options.output or Path(f"{options.of}_demo.yaml")
    if file.exists() and not options.force:
        raise UsageError(f"{file} is there already. Choose another name with -o, or overwrite it with --force.")
    file.write_text(DEMOS[options.of], encoding="utf-8")
    print_report(f"Wrote {file}. Edit it; `astray help hooktools` explains every key.")


def _compare(options: argparse.Namespace) -> None:
    result = Comparer(options.config).compare()
    if options.html is not None:
        print_report(f"The page is in {result.comparison.to_html(options.html)}.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m astray.compat.hooktools", description=DESCRIPTION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="write tracer_demo.yaml or comparer_demo.yaml, every key with its meaning")
    demo.add_argument("of", nargs="?", choices=tuple(DEMOS), default="tracer", help="which; tracer by default")
    demo.add_argument("-o", "--output", type=Path, metavar="FILE", help="under another name")
    demo.add_argument("--force", action="store_true", help="overwrite a file that is there")
    demo.set_defaults(work=_demo)
    compare = commands.add_parser("compare", help="compare two dumps as a comparer's YAML file says")
    compare.add_argument("config", metavar="FILE", help="such as comparer_demo.yaml")
    compare.add_argument("--html", type=Path, metavar="FILE", help="also write the page: choose epoch and metric there")
    compare.set_defaults(work=_compare)
    return parser
