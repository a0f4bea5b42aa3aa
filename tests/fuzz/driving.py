"""Everything one does with a run, over one that is damaged: every command and every document of the page.

An exception that is not an AstrayError is a finding, and so is a traceback that a command has printed, an exit code
that there is none of, more than so many seconds of computing, and memory beyond what the process may have.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import random
import re
import shutil
import signal
import tempfile
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from xml.etree import ElementTree

import astray
from astray.cli import main
from astray.errors import AstrayError
from astray.results.run import CheckpointRun
from astray.store.formats import WRITABLE

SECONDS = 30
"""Of computing that one action may take: hundreds of times what it takes on what is whole."""

MOST_ROWS = 40
"""Rows of which everything is asked for."""


class Finding(NamedTuple):
    """Something that should not have happened: what was done, the error, where, and the whole traceback."""

    action: str
    error: str
    where: str
    told: str


class TooLong(BaseException):
    """An action has computed for too long. `except Exception` does not catch this."""


class Scene(NamedTuple):
    """A damaged run, a whole one of its kind, and a folder to write into."""

    damaged: Path
    whole: Path
    out: Path
    chance: random.Random


def drive(scene: Scene, actions: list[str]) -> list[Finding]:
    """Do these things with a damaged run."""
    found = []
    for name in actions:
        try:
            with _in_time(), warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.simplefilter("ignore", UserWarning)  # that something of a checkpoint is not read
                (ACTIONS | LATE)[name](scene)
        except AstrayError as error:  # noqa: PERF203
            if not str(error).endswith((".", "?")):
                found.append(Finding(name, f"a sentence without an end: {str(error)[:300]!r}", "", ""))
        except (Exception, TooLong) as error:  # noqa: BLE001
            told = str(error) if isinstance(error, Printed) else "".join(traceback.format_exception(error))
            found.append(Finding(name, _summary(told), _where(told), told))
    return found


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    def ring(_: int, __: FrameType | None) -> None:
        raise TooLong(f"more than {SECONDS} s of computing")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _where(told: str) -> str:
    """The innermost line of ours that a traceback goes through."""
    lines = re.findall(r'File ".*/astray/([^"]*)", line (\d+)', told)
    return ":".join(lines[-1]) if lines else ""


def _summary(told: str) -> str:
    """The error that a traceback ends with."""
    lines = [line for line in told.splitlines() if re.match(r"[\w.]+(Error|Warning|Long|Exception)\b", line)]
    return (lines or told.splitlines())[-1][:300]


# -- what is done ----------------------------------------------------------------------------------------------------


def look(scene: Scene) -> None:
    """Open a run and read all of it."""
    run = astray.open(scene.damaged)
    repr(run), run.complete, run.steps, len(run.table())
    for problem in run.problems:
        assert problem.endswith((".", "?")), f"a problem without an end: {problem!r}"
    for rank in run.ranks.values():
        for row in range(min(len(rank.tensors), 10 * MOST_ROWS)):
            rank.tensors.row(row)
            for read in (rank.values, rank.verified):
                with contextlib.suppress(AstrayError):
                    read(row)
        for row in range(min(len(rank.calls), 10 * MOST_ROWS)):
            stack = rank.calls.row(row)["stack"]
            rank.stack(-1 if stack is None else stack)
        rank.setup  # noqa: B018
    if not isinstance(run, CheckpointRun):
        import pyarrow

        pyarrow.table(run.table())


def tensors_by_key(scene: Scene) -> None:
    run = astray.open(scene.damaged)
    for number, rank in run.ranks.items():
        for row in _some(scene, len(rank.tensors)):
            call = int(rank.call_rows[row])
            if call >= 0:
                calls, tensors = rank.calls.row(call), rank.tensors.row(row)
                fields = [calls[name] for name in ("step", "micro", "site", "call", "phase")]
                key = astray.Key(*fields, tensors["role"], tensors["path"], number)
                with contextlib.suppress(AstrayError):
                    run.tensor(key)


def graph(scene: Scene) -> None:
    """Ask a graph about rows and calls."""
    from astray.graph import graph_of

    for rank in astray.open(scene.damaged).ranks.values():
        found = graph_of(rank)
        for row in _some(scene, len(rank.tensors)):
            for ask in (found.sightings, found.consumers, found.contributors, found.explains):
                ask(row)
        for call in _some(scene, len(rank.calls)):
            for ask in (found.rows_of, found.results, found.inputs, found.given, found.children, found.around):
                ask(call)


def series(scene: Scene) -> None:
    from astray.state.monitor import points

    for rank in astray.open(scene.damaged).ranks.values():
        list(points(rank, ("mean", "l2")))


def documents_of_run(scene: Scene) -> None:
    """What the page shows of one run."""
    from astray.web.run_list import run_document
    from astray.web.views import RunView
    from astray.web.wire import encode

    run = astray.open(scene.damaged)
    encode(run_document("0", run))
    _documents(scene, RunView(run))


def documents_of_pair(scene: Scene) -> None:
    from astray.web.views import ComparisonView

    runs = scene.chance.sample([scene.damaged, scene.whole], 2)
    _documents(scene, ComparisonView(astray.compare(*runs, processes=1)))


def _documents(scene: Scene, view: Any) -> None:
    from astray.web.detail import detail_of
    from astray.web.overview import overview_of
    from astray.web.wire import encode, pack

    encode(overview_of(view))
    pack(view.table)
    for row in _some(scene, len(view)):
        encode(detail_of(view, row))


def in_python(scene: Scene) -> None:
    """A comparison as one has it in a notebook."""
    found = astray.compare(scene.whole, scene.damaged, processes=1, **_pairing(scene))
    repr(found), str(found), found._repr_html_(), found.first, found.suspects
    found.select("error > 1e-3 or not agrees", "-error").to_pandas()


def compare_in_processes(scene: Scene) -> None:
    astray.compare(scene.damaged, scene.whole, processes=2)


def alarms(scene: Scene) -> None:
    str(astray.open(scene.damaged).alarms())


def risk(scene: Scene) -> None:
    str(astray.open(scene.damaged).risk(what_if="float16,float8_e4m3fn"))


def other_doors(scene: Scene) -> None:
    """The comparisons of other tools, over their own dumps."""
    name = astray.open(scene.whole).info.settings.get("format")
    if name == "msprobe":
        from astray.compat.msprobe import compare as compare_msprobe

        pair = {"npu_path": str(scene.damaged), "bench_path": str(scene.whole)}
        compare_msprobe(pair, scene.out, xlsx=scene.chance.random() < 0.5)
    elif name == "torch_npu":
        from astray.compat.torch_npu.tools import compare as compare_torch_npu

        compare_torch_npu(str(scene.damaged), str(scene.whole), str(scene.out / "table.csv"))
    elif name == "saving_hook":
        from astray.foreign.saving_hook.checker import check, plan

        for job in plan(scene.damaged, scene.whole)[0]:
            check(job, scene.out, lambda _, __: None)
    elif name == "hooktools":
        from astray.compat.hooktools import Comparer

        folders = {"compared_directory_1": str(scene.whole), "compared_directory_2": str(scene.damaged)}
        str(Comparer({"compare_mode": 0, "compare_directory_options": folders}).find())


def state(scene: Scene) -> None:
    """A checkpoint as a state."""
    if isinstance(astray.open(scene.damaged), CheckpointRun):
        found = astray.state.load_state(scene.damaged)
        repr(found), str(found.abs_max())


def state_of_two(scene: Scene) -> None:
    """Two checkpoints as states, reckoned with."""
    if isinstance(astray.open(scene.damaged), CheckpointRun):
        found = astray.state.load_state(scene.damaged) - astray.state.load_state(scene.whole)
        repr(found), str(found.abs_max()), str(found.describe(display=False))
        found.save(scene.out / "difference.safetensors")


def page(scene: Scene) -> None:
    """What a user does in the page: two runs or one, every document, and the rows to take away."""
    from astray.web.run_list import RunList
    from astray.web.wire import encode
    from astray.web.workspace import Workspace

    workspace = Workspace(RunList([scene.damaged, scene.whole]), {"processes": 1})
    chosen = scene.chance.choice((("0", None), ("0", "1"), ("1", "0")))
    err = io.StringIO()
    with contextlib.redirect_stderr(err):  # the thread prints what is a fault
        job = workspace.open(*chosen, {})
        job.wait()
    if "Traceback" in err.getvalue():
        raise Printed(err.getvalue())
    encode(workspace.session())
    encode(workspace.runs.document("0"))
    shown = workspace.shown
    assert shown.overview, "a page without an overview"
    assert shown.columns, "a page without a table"
    for row in _some(scene, len(shown.view))[:10]:
        shown.pair(row)


def page_of_a_folder(scene: Scene) -> None:
    """The runs in a folder, to choose from."""
    from astray.web.run_list import RunList
    from astray.web.wire import encode

    run_list = RunList([scene.damaged.parent])
    encode({"runs": run_list.documents()})
    for number in range(len(run_list)):
        encode(run_list.document(str(number)))


def exported(scene: Scene) -> None:
    from astray.web.server import MEDIA, ExportedFile

    found = astray.compare(scene.damaged, scene.whole, processes=1)
    for kind in MEDIA:
        for concluded in (False, True):
            ExportedFile(found, kind, "not agrees", scene.chance.choice(("site", "-path", "-error")), concluded).close()


def reports_read(scene: Scene) -> None:
    """Every report can be read by what reads such files."""
    _command("compare", "DAMAGED", "WHOLE", "--processes", "1", *REPORTS)(scene)
    junit, document = scene.out / "a.xml", scene.out / "a.json"
    if junit.exists():
        ElementTree.parse(junit)
    if not document.exists():
        return
    json.loads(document.read_text(encoding="utf-8"), parse_constant=_no_constant)
    (scene.out / "a.html").read_text(encoding="utf-8")
    for name in ("pairs.csv", "summary.csv"):
        with (scene.out / "csv" / name).open(newline="", encoding="utf-8") as file:
            assert len({len(row) for row in csv.reader(file)}) == 1, f"{name} has rows of several lengths"
    with zipfile.ZipFile(scene.out / "a.xlsx") as book:
        for name in book.namelist():
            if name.endswith(".xml"):
                ElementTree.fromstring(book.read(name))


def _no_constant(word: str) -> None:
    raise ValueError(f"JSON has no {word}")


def converted_and_read(scene: Scene) -> None:
    """What a damaged run is converted to is a run that can be opened, compared and converted again."""
    formats = [*WRITABLE, "lines"]
    room = Path(tempfile.mkdtemp(dir=scene.out))
    first, second = room / "first", room / "second"
    for source, target in ((scene.damaged, first), (first, second)):
        name = scene.chance.choice(formats)
        place = target.with_name(f"{target.name}.pkl") if name == "lines" else target
        astray.convert(source, place, to="torch_npu" if name == "lines" else name)
        if place != target:
            target.symlink_to(place)
        look(scene._replace(damaged=place))
    astray.compare(first, second, processes=1)


def converted_onto(scene: Scene) -> None:
    """A whole run is written where a damaged one is, which it may replace or not."""
    if not scene.damaged.exists():
        return
    place = Path(tempfile.mkdtemp(dir=scene.out)) / scene.damaged.name
    shutil.copytree(scene.damaged, place, symlinks=True) if scene.damaged.is_dir() else shutil.copy(
        scene.damaged, place
    )
    format = scene.chance.choice(list(WRITABLE))
    for overwrite in (False, True):
        with contextlib.suppress(AstrayError, OSError):  # which commands tell as a sentence
            astray.convert(scene.whole, place, to=format, overwrite=overwrite)
    look(scene._replace(damaged=place))


def other_doors_with_options(scene: Scene) -> None:
    """The comparisons of other tools with what else they are asked for."""
    name = astray.open(scene.whole).info.settings.get("format")
    if name == "msprobe":
        from astray.compat.msprobe import compare as compare_msprobe

        pair = {"npu_path": str(scene.whole), "bench_path": str(scene.damaged)}
        compare_msprobe(pair, scene.out, stack_mode=True, fuzzy_match=True, xlsx=scene.chance.random() < 0.5)
    elif name == "torch_npu":
        from astray.compat.torch_npu.tools import compare as compare_torch_npu

        compare_torch_npu(str(scene.whole), str(scene.damaged), str(scene.out / "table.csv"), shape_flag=True)


def mapped(scene: Scene) -> None:
    """A mapping is drafted into a file, and compared with."""
    file = scene.out / "mapping.yaml"
    _command("map", "WHOLE", "DAMAGED", "-o", "OUT/mapping.yaml")(scene)
    if file.exists():
        _command("compare", "WHOLE", "DAMAGED", "--map", "OUT/mapping.yaml", "--processes", "1")(scene)


def _with_some(*words: str, options: Sequence[Sequence[str]]) -> Callable[[Scene], None]:
    """A command with some of these options."""

    def run(scene: Scene) -> None:
        some = scene.chance.sample(options, min(len(options), scene.chance.choice((1, 2, 3))))
        _command(*words, *(word for option in some for word in option))(scene)

    return run


def _some(scene: Scene, count: int) -> list[int]:
    """Some rows of so many, the first and the last among them."""
    inner = scene.chance.sample(range(count), min(count, MOST_ROWS))
    return sorted({*inner, *range(min(3, count)), *range(max(0, count - 3), count)})


def _pairing(scene: Scene) -> dict[str, Any]:
    ways: list[dict[str, Any]] = [
        {}, {}, {"by": "order"}, {"micro": "joined"}, {"shapes": "loose"}, {"offset": 1}, {"exact": True},
        {"sites": "layers"}, {"steps": "0:2"}, {"shapes": "same", "by": "order"}, {"metrics": ["kl"]},
        {"noise": scene.damaged}, {"allow_missing": True}, {"tolerances": {"float32": 1e-3}},
    ]  # fmt: skip
    return scene.chance.choice(ways)


def _command(*words: str) -> Callable[[Scene], None]:
    """A command; DAMAGED, WHOLE and OUT in it are paths."""

    def run(scene: Scene) -> None:
        places = {"DAMAGED": str(scene.damaged), "WHOLE": str(scene.whole)}
        filled = [places.get(word, word.replace("OUT", str(scene.out))) for word in words]
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="") for _ in range(2))  # as strict as a pipe
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(filled)
        said = "".join(_content(stream) for stream in (out, err))
        if code not in (0, 1, 2) or "Traceback" in said or not said.strip():
            raise Printed(said.strip() or f"nothing, with exit code {code}")

    return run


def _content(stream: io.TextIOWrapper) -> str:
    stream.flush()
    raw = stream.buffer
    assert isinstance(raw, io.BytesIO)
    return raw.getvalue().decode("utf-8")


class Printed(Exception):  # noqa: N818
    """What a command has printed, which is a traceback."""


REPORTS = (
    "--csv",
    "OUT/csv",
    "--xlsx",
    "OUT/a.xlsx",
    "--json",
    "OUT/a.json",
    "--html",
    "OUT/a.html",
    "--junit",
    "OUT/a.xml",
)

ACTIONS: dict[str, Callable[[Scene], None]] = {
    "look": look,
    "tensors by key": tensors_by_key,
    "graph": graph,
    "series": series,
    "documents of a run": documents_of_run,
    "documents of a pair": documents_of_pair,
    "in python": in_python,
    "alarms": alarms,
    "risk": risk,
    "state": state,
    "other doors": other_doors,
    "in processes": compare_in_processes,
    "show": _command("show", "DAMAGED"),
    "show sorted": _command("show", "DAMAGED", "--sort", "absmax", "--top", "0", "--match", "layers"),
    "show --alarms": _command("show", "DAMAGED", "--alarms"),
    "show --risk": _command("show", "DAMAGED", "--risk", "--top", "0"),
    "show --risk --as": _command("show", "DAMAGED", "--risk", "--as", "float16,float8_e5m2"),
    "compare": _command("compare", "WHOLE", "DAMAGED", "--processes", "1"),
    "compare back": _command("compare", "DAMAGED", "WHOLE", "--processes", "1"),
    "compare itself": _command("compare", "DAMAGED", "DAMAGED", "--processes", "1"),
    "compare --exact": _command(
        "compare", "WHOLE", "DAMAGED", "--exact", "--top", "0", "--sort", "-error", "--processes", "1"
    ),
    "compare --setup": _command("compare", "WHOLE", "DAMAGED", "--setup", "--processes", "1"),
    "compare --by order": _command("compare", "WHOLE", "DAMAGED", "--by", "order", "--processes", "1"),
    "compare --micro joined": _command("compare", "DAMAGED", "WHOLE", "--micro", "joined", "--processes", "1"),
    "compare --noise": _command("compare", "WHOLE", "WHOLE", "--noise", "DAMAGED", "--processes", "1"),
    "reports": _command("compare", "WHOLE", "DAMAGED", "--processes", "1", *REPORTS),
    "reports back": _command("compare", "DAMAGED", "WHOLE", "--processes", "1", *REPORTS),
    "compare --replicas": _command("compare", "DAMAGED", "--replicas"),
    "map": _command("map", "WHOLE", "DAMAGED"),
    "map back": _command("map", "DAMAGED", "WHOLE"),
    **{
        f"convert to {name}": _command("convert", "DAMAGED", f"OUT/{name}", "--to", name, "--force")
        for name in WRITABLE
    },
}
"""Everything one does, by a name."""

SHOWN = [
    ("--steps", "0:2"), ("--rank", "0"), ("--match", "layers|h"), ("--phase", "backward"), ("--role", "gradient"),
    ("--sort", "std"), ("--sort", "nan"), ("--top", "0"),
]  # fmt: skip
COMPARED = [
    ("--filter", "error > 1e-3 or site =~ 'a'"), ("--filter", "not agrees"), ("--sort", "site"), ("--sort", "-path"),
    ("--sort", "shape"), ("--top", "0"), ("--steps", "1:"), ("--ranks", "0"), ("--sites", "layers"), ("--exact",),
    ("--tolerance", "float32=1e-3"), ("--allow-missing",), ("--metric", "kl"), ("--by", "key"), ("--by", "order"),
    ("--shapes", "loose"), ("--shapes", "same"), ("--micro", "joined"), ("--offset", "1"), ("--setup",),
    ("--csv", "OUT/some"), ("--junit", "OUT/some.xml"), ("--json", "OUT/some.json"),
]  # fmt: skip
LATE: dict[str, Callable[[Scene], None]] = {
    "state of two": state_of_two,
    "page": page,
    "page of a folder": page_of_a_folder,
    "exported": exported,
    "reports read": reports_read,
    "converted and read": converted_and_read,
    "converted and read again": converted_and_read,
    "converted onto": converted_onto,
    "other doors with options": other_doors_with_options,
    "mapped": mapped,
    "show some": _with_some("show", "DAMAGED", options=SHOWN),
    "show some risks": _with_some("show", "DAMAGED", "--risk", options=[*SHOWN[:5], ("--sort", "growth")]),
    "show some alarms": _with_some("show", "DAMAGED", "--alarms", options=SHOWN[:2]),
    "compare some": _with_some("compare", "WHOLE", "DAMAGED", "--processes", "1", options=COMPARED),
    "compare some back": _with_some("compare", "DAMAGED", "WHOLE", "--processes", "1", options=COMPARED),
    "replicas some": _with_some("compare", "DAMAGED", "--replicas", options=[("--steps", "0:2"), ("--sites", "h")]),
    "replay": _command("replay", "DAMAGED", "--top", "0"),
    "replay --json": _command("replay", "DAMAGED", "--steps", "1:", "--json"),
    "convert to lines": _command("convert", "DAMAGED", "OUT/lines.pkl", "--to", "torch_npu"),
    "convert steps": _command("convert", "DAMAGED", "OUT/steps", "--to", "msprobe", "--steps", "1:"),
}
"""What came late: only late seeds choose among these, too."""

ALWAYS = ("look",)
SEVERAL = 7


def chosen(chance: random.Random, late: bool = False) -> list[str]:
    """Some of the actions."""
    rest = [name for name in (*ACTIONS, *(LATE if late else ())) if name not in ALWAYS]
    return [*ALWAYS, *chance.sample(rest, SEVERAL)]
