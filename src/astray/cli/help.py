"""`astray help [TOPIC]`: the documentation of this very version, page by page, with no network and no checkout.

A wheel carries the pages of docs/ as `astray/docs`; an editable install has them where they are written.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Protocol

from astray.errors import UsageError
from astray.formatting.terminal import say, wants_colour, width
from astray.wording import did_you_mean

PAGER = "less -FRX"  # which ends by itself when the page fits on the screen


class Pages(Protocol):
    """A folder, in a file system or in an archive."""

    def joinpath(self, name: str, /) -> Pages: ...
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
        say(_listed(pages))
        return 0
    from astray.cli import parser

    topic = Path(options.topic).name.removesuffix(".md")
    if topic in pages:
        from astray.cli.markdown import as_text

        _show(as_text(pages[topic], width(), wants_colour(sys.stdout)))
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


def read_pages() -> dict[str, str]:
    """Every page by its topic; none where the installation has left them out."""
    home: Pages = files("astray").joinpath("docs")
    if not home.is_dir():
        checkout = Path(__file__).parents[3]
        home = checkout / "docs"
        if not (checkout / "pyproject.toml").is_file() or not home.is_dir():
            return {}
    names = sorted(one.name for one in home.iterdir() if one.name.endswith(".md"))  # type: ignore[attr-defined]
    return {name.removesuffix(".md"): home.joinpath(name).read_text(encoding="utf-8") for name in names}


def _listed(pages: dict[str, str]) -> str:
    from astray.cli.markdown import title_of

    room = max(map(len, pages), default=0) + 2
    lines = [f"  {topic:{room}}{title_of(text)}" for topic, text in pages.items()]
    return "\n".join(["astray help TOPIC prints one of these:", "", *lines, "", "astray help COMMAND is its --help."])


def _show(text: str) -> None:
    """Print a page; on a terminal that is too small for it, by the user's pager."""
    tall = text.count("\n") + 1 >= shutil.get_terminal_size().lines
    pager = os.environ.get("PAGER", PAGER).split()
    if tall and pager and sys.stdout.isatty() and sys.stdin.isatty() and shutil.which(pager[0]):
        with contextlib.suppress(OSError, KeyboardInterrupt):
            subprocess.run(pager, input=text, text=True, encoding="utf-8", check=False)
            return
    say(text)
