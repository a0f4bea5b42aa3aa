"""`astray help [TOPIC]`: the documentation of this very version, page by page, with no network and no checkout.

A wheel carries the pages of docs/ as `astray/docs`; an editable install reads docs/ itself. docs/nav.yml has their
order, which is that of the site; a topic is the name of a page without its folder. `as_text` lays out Markdown, as far
as docs/ uses it, for a terminal or a pipe. Links to other pages become the command that shows them. On a terminal
headings and code are set off by colour; in a pipe headings are underlined and code keeps its backticks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from astray.errors import UsageError
from astray.formatting.page import BOLD, YELLOW, painted
from astray.formatting.terminal import print_report, wants_colour, width
from astray.wording import did_you_mean

PAGER = "less -FRX"  # which ends by itself when the page fits on the screen

FORMER = "moving-from-"
"""What topics about other tools began with; they are still known by these names."""


class Page(NamedTuple):
    """A page of the documentation: its section in the site, and its Markdown."""

    section: str
    text: str


class Folder(Protocol):
    """A folder, in a file system or in an archive."""

    def joinpath(self, name: str, /) -> Folder: ...
    def is_dir(self) -> bool: ...
    def is_file(self) -> bool: ...
    def read_text(self, encoding: str = "utf-8") -> str: ...


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "help",
        help="print a page of the documentation",
        description="Prints a page of the documentation, or the options of a command. Without a topic it lists them.",
    )
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help="such as recording, reports, verdict, guard")
    parser.set_defaults(main=main)


def main(options: argparse.Namespace) -> int:
    pages = read_pages()
    if options.topic is None:
        print_report(_listed(pages))
        return 0
    from astray.cli import parser

    topic = Path(options.topic).name.removesuffix(".md").removeprefix(FORMER)
    if topic in pages:
        _show(as_text(pages[topic].text, width(), wants_colour(sys.stdout)))
        return 0
    commands = parser().commands
    if topic in commands:
        commands[topic].print_help()
        return 0
    known = [*pages, *commands]
    raise UsageError(
        f"There is no topic {topic!r}.{did_you_mean(topic, known)} `astray help` lists all of them."
        if pages
        else "This installation has no pages of documentation. `astray COMMAND --help` explains each command."
    )


def read_pages() -> dict[str, Page]:
    """Every page by its topic, in the order of the site; none where the installation has left them out."""
    folder: Folder = files("astray").joinpath("docs")
    if not folder.is_dir():
        checkout = Path(__file__).parents[3]
        folder = checkout / "docs"
        if not (checkout / "pyproject.toml").is_file():
            return {}
    order = folder.joinpath("nav.yml")
    if not order.is_file():
        return {}
    import yaml

    pages = {}
    for section, path in _in_order(yaml.safe_load(order.read_text(encoding="utf-8"))["nav"]):
        file = folder
        for name in path.split("/"):
            file = file.joinpath(name)
        if file.is_file():  # the site has pages that its build makes
            pages[Path(path).stem] = Page(section, file.read_text(encoding="utf-8"))
    return pages


def _in_order(nav: list[dict[str, Any]], section: str = "") -> Iterator[tuple[str, str]]:
    """The section and the path of each page, from the entries of nav.yml."""
    for entry in nav:
        for title, what in entry.items():
            if isinstance(what, str):
                yield section, what
            else:
                yield from _in_order(what, section or title)


def _listed(pages: dict[str, Page]) -> str:
    room = max(map(len, pages), default=0) + 2
    lines = ["astray help TOPIC prints one of these:"]
    section = None
    for topic, page in pages.items():
        if page.section != section:
            lines += ["", page.section] if page.section else [""]
            section = page.section
        lines.append(f"  {topic:{room}}{title_of(page.text)}")
    return "\n".join([*lines, "", "astray help COMMAND is its --help."])


def _show(text: str) -> None:
    """Print a page; on a terminal that is too small for it, by the user's pager."""
    tall = text.count("\n") + 1 >= shutil.get_terminal_size().lines
    pager = os.environ.get("PAGER", PAGER).split()
    if tall and pager and sys.stdout.isatty() and sys.stdin.isatty() and shutil.which(pager[0]):
        with contextlib.suppress(OSError, KeyboardInterrupt):
            subprocess.run(pager, input=text, text=True, encoding="utf-8", check=False)
            return
    print_report(text)


# -- Markdown as text --------------------------------------------------------------------------------------------------


CODE_INDENT = 4
_GAP = 2  # columns between the columns of a table
_NARROWEST = 10  # a column of a table, where there is too little room

_TOKEN = re.compile(
    r"(?P<ticks>`+)(?P<code>.+?)(?P=ticks)|!?\[(?P<text>(?:[^\[\]`]|`[^`]*`)*)\]\((?P<target>[^)\s]*)\)"
)
_ITEM = re.compile(r"( *)([-*]|\d+\.) +(.*)")
_ON, _OFF = "\ue000", "\ue001"  # around what is set off by colour
_FIXED, _STAR = "\u00a0", "\ue002"  # in code: a blank at which no line ends, and a star that makes nothing bold


def as_text(markdown: str, width: int, colour: bool) -> str:
    """A page as lines that are no wider than `width`, but for code, and names that are longer."""
    writer = _Writer(width, colour)
    for block in _blocks(markdown.splitlines()):
        writer.write(block)
    return "\n".join(writer.lines).strip("\n")


def title_of(markdown: str) -> str:
    """What a page is about: its first heading."""
    return next((line[2:].strip() for line in markdown.splitlines() if line.startswith("# ")), "")


def _blocks(lines: Sequence[str]) -> Iterator[list[str]]:
    """Lines that belong together: a heading, a table, a list, a paragraph, or code with its fences."""
    block: list[str] = []
    fence = ""
    for line in lines:
        mark = re.match(r" *(`{3,})", line)
        if fence:
            block.append(line)
            if mark and mark[1] == fence:
                yield block
                block, fence = [], ""
            continue
        begins = mark is not None or line.startswith("#") or not line.strip()
        if block and (begins or block[0].startswith("#") or _is_row(line) != _is_row(block[0])):
            yield block
            block = []
        if mark:
            fence = mark[1]
        if line.strip():
            block.append(line)
    if block:
        yield block


def _is_row(line: str) -> bool:
    return line.startswith("|")


class _Writer:
    """Lays out block after block."""

    def __init__(self, width: int, colour: bool) -> None:
        self._width, self._colour = width, colour
        self.lines: list[str] = []

    def write(self, block: list[str]) -> None:
        first = block[0]
        if first.startswith("#"):
            self._heading(first)
        elif first.lstrip().startswith("```"):
            code = textwrap.dedent("\n".join(block[1:-1])).splitlines()
            self._add(f"{' ' * CODE_INDENT}{line}" if line else "" for line in code)
        elif _is_row(first):
            self._table([_cells(line) for line in block])
        elif _ITEM.match(first):
            self._list(block)
        else:
            text = self._inline(" ".join(line.strip() for line in block))
            if text:
                self._add(self._folded(text, self._width))

    def _add(self, lines: Iterator[str] | Sequence[str]) -> None:
        self.lines += [*lines, ""]

    def _heading(self, line: str) -> None:
        marks, _, text = line.partition(" ")
        plain = _plain(self._inline(text))
        if self._colour:
            self._add([painted(plain, YELLOW)])
        else:
            self._add([plain, ("=" if len(marks) == 1 else "-") * len(plain)])

    def _list(self, block: list[str]) -> None:
        items: list[tuple[int, str, str]] = []  # how deep, the mark, the text
        for line in block:
            match = _ITEM.match(line)
            if match:
                items.append((len(match[1]), match[2], match[3]))
            elif items:
                depth, mark, text = items[-1]
                items[-1] = depth, mark, f"{text} {line.strip()}"
        lines: list[str] = []
        for depth, mark, text in items:
            lead = f"{' ' * depth}{'•' if mark in '-*' else mark} "
            folded = self._folded(self._inline(text), self._width - len(lead))
            lines += [(lead if at == 0 else " " * len(lead)) + line for at, line in enumerate(folded)]
        self._add(lines)

    def _table(self, rows: list[list[str]]) -> None:
        head, body = rows[0], [row for row in rows[1:] if not all(re.fullmatch(r":?-+:?", cell) for cell in row)]
        count = max(map(len, rows))
        cells = [[self._inline(cell) for cell in (*row, *[""] * (count - len(row)))] for row in (head, *body)]
        columns = list(zip(*cells, strict=True))
        widths = _fitted(
            [max(map(_visible, column)) for column in columns],
            [max(_visible(word) for cell in column for word in cell.split(" ")) for column in columns],
            self._width - _GAP * (count - 1),
        )
        lines: list[str] = []
        for number, row in enumerate(cells):
            if number == 0 and not any(row):
                continue
            folded = [self._folded(cell, room) or [""] for cell, room in zip(row, widths, strict=True)]
            for at in range(max(map(len, folded))):
                parts = [part[at] if at < len(part) else "" for part in folded]
                padded = (part + " " * (room - _visible_of(part)) for part, room in zip(parts, widths, strict=True))
                lines.append((" " * _GAP).join(padded).rstrip())
            if number == 0:
                lines.append((" " * _GAP).join("─" * room for room in widths))
        self._add(lines)

    def _inline(self, text: str) -> str:
        """A text with marks around what is set off."""
        marked = _TOKEN.sub(self._token, text).replace("\\|", "|")
        strong = re.sub(r"\*\*(.+?)\*\*", lambda found: self._strong(found[1]), marked)
        return strong.replace(_STAR, "*")

    def _token(self, found: re.Match[str]) -> str:
        if found["code"] is not None:
            return self._code(found["code"])
        return "" if found[0].startswith("!") else self._linked(found["text"], found["target"])

    def _code(self, text: str) -> str:
        fixed = text.replace("*", _STAR)
        fixed = fixed.replace(" ", _FIXED) if len(text) <= self._width // 2 else fixed
        return _set_off(fixed) if self._colour else f"`{fixed}`"

    def _strong(self, text: str) -> str:
        return _set_off(text.replace(_ON, "").replace(_OFF, "")) if self._colour else text

    def _linked(self, text: str, address: str) -> str:
        """What a link says, and where it leads: to another page by its command, elsewhere by its address."""
        target = address.partition("#")[0]
        said = _TOKEN.sub(self._token, text)
        file = Path(target).name
        if file.endswith(".md") and "://" not in target and not target.startswith("../../"):  # that leads out of docs/
            command = self._code(f"astray help {file[:-3]}")
            return command if text == file else f"{said} ({command})"
        return f"{said} ({address})" if "://" in target and text != address else said

    def _folded(self, text: str, width: int) -> list[str]:
        lines = textwrap.wrap(text, max(width, 1), break_long_words=False, break_on_hyphens=False)
        return [_painted(line) for line in lines]


def _set_off(text: str) -> str:
    """A text between marks, each word by itself: a line may end between them."""
    return " ".join(f"{_ON}{word}{_OFF}" for word in text.split(" "))


def _painted(line: str) -> str:
    bold = re.sub(f"{_ON}(.*?){_OFF}", lambda found: painted(found[1].replace(_FIXED, " "), BOLD), line)
    return bold.replace(_FIXED, " ")


def _plain(text: str) -> str:
    return text.replace(_ON, "").replace(_OFF, "").replace(_FIXED, " ")


def _visible(text: str) -> int:
    """How wide the widest a line can be: the whole text on one."""
    return len(_plain(text))


def _visible_of(line: str) -> int:
    return len(re.sub(r"\x1b\[[\d;]*m", "", line))


def _cells(line: str) -> list[str]:
    """The cells of a row; a bar in code, or behind a backslash, does not end one."""
    text = line.strip()[1:]
    text = text[:-1] if text.endswith("|") and not text.endswith("\\|") else text
    cells, inside = [""], False
    for sign in text:
        inside ^= sign == "`"
        if sign == "|" and not inside and not cells[-1].endswith("\\"):
            cells.append("")
        else:
            cells[-1] += sign
    return [cell.strip() for cell in cells]


def _fitted(natural: list[int], words: list[int], room: int) -> list[int]:
    """Widths of columns that fit into the room: the widest give way first, as far as their longest word."""
    widths = list(natural)
    while sum(widths) > room:
        wide = [at for at, width in enumerate(widths) if width > max(words[at], _NARROWEST)]
        if not wide:
            break  # words are longer than there is room, and are never broken
        widths[max(wide, key=widths.__getitem__)] -= 1
    return widths
