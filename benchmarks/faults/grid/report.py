"""What the grid's command prints: how many faults are named beside each honest difference, and which controls alarm."""

from __future__ import annotations

from collections.abc import Sequence

from tables import markdown

from faults.grid.judging import Judged
from faults.grid.variants import DIFFERENCES

HALVES = ("seen", "unseen")
COLUMNS = ("exact", "top 3", "silent", "wrong")


def print_report(judged: Sequence[Judged], details: bool) -> None:
    """One table for each way to record and to judge, and one of all controls."""
    faults = [one for one in judged if one.case.culprit is not None]
    for setting in dict.fromkeys(map(setting_of, faults)):
        print(f"### {setting}\n\n{fault_table([one for one in faults if setting_of(one) == setting])}\n")
    if any(one.setting_named is not None for one in faults):
        print(f"### Settings that are the cause\n\n{settings_table(faults)}\n")
    controls = [one for one in judged if one.case.culprit is None]
    if controls:
        print(f"### Controls\n\n{control_table(controls)}\n")
        alarms = [one for one in controls if one.result != "silent" and (details or one.case.half == "seen")]
        if alarms:
            print(f"{alarm_table(alarms)}\n")
    if details:
        print(f"### Not exact\n\n{missed_table([one for one in faults if one.result != 'exact'])}")


def setting_of(judged: Judged) -> str:
    case = judged.case
    by = "by values" if case.keep == "tensors" else "by statistics"
    return f"{case.level} level, {by}, {'with' if case.noise_runs else 'without'} a noise run"


def fault_table(judged: Sequence[Judged]) -> str:
    """One line for each difference, with the columns of each half."""
    halves = [half for half in HALVES if any(one.case.half == half for one in judged)]
    heads = ["reference → candidate"]
    for half in halves:
        heads += [f"{half}: faults", *COLUMNS]
    noises = [name for name in DIFFERENCES if any(one.case.noise == name for one in judged)]
    rows = []
    for noise in [*noises, None]:
        row = ["all" if noise is None else DIFFERENCES[noise].what]
        for half in halves:
            row += _counts([one for one in judged if one.case.half == half and noise in (None, one.case.noise)])
        rows.append(row)
    return markdown(heads, rows)


def _counts(judged: Sequence[Judged]) -> list[str]:
    results = [one.result for one in judged]
    counts = [results.count("exact"), sum(one.top_3 for one in judged), results.count("silent"), results.count("wrong")]
    return [str(len(judged)), *map(str, counts)]


def settings_table(judged: Sequence[Judged]) -> str:
    """Of each way to record and judge, and each half: how many settings that are the cause are named."""
    rows = []
    for setting in dict.fromkeys(map(setting_of, judged)):
        row = [setting]
        for half in HALVES:
            named = [one.setting_named for one in judged if setting_of(one) == setting and one.case.half == half]
            row += [str(len(named) - named.count(None)), str(named.count(True))]
        rows.append(row)
    return markdown(["setting", *(f"{half}: {what}" for half in HALVES for what in ("settings", "named"))], rows)


def control_table(judged: Sequence[Judged]) -> str:
    """Of each way to record and judge, and each half: how many controls alarm."""
    rows = []
    for setting in dict.fromkeys(map(setting_of, judged)):
        row = [setting]
        for half in HALVES:
            results = [one.result for one in judged if setting_of(one) == setting and one.case.half == half]
            row += [str(len(results)), str(len(results) - results.count("silent"))]
        rows.append(row)
    return markdown(["setting", *(f"{half}: {what}" for half in HALVES for what in ("controls", "alarms"))], rows)


def alarm_table(judged: Sequence[Judged]) -> str:
    rows = [[one.case.name, one.found] for one in judged]
    return markdown(["false alarm", "found"], rows, words=2)


def missed_table(judged: Sequence[Judged]) -> str:
    rows = [
        [one.case.name, str(one.case.culprit), one.found, one.result + (", top 3" if one.top_3 else "")]
        for one in judged
    ]
    return markdown(["case", "culprit", "found", "result"], rows, words=4)
