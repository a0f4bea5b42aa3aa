"""What the documentation names exists: modules, pages, links, commands. `make docs` checks the links of the site."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from astray.cli import parser
from astray.cli.compare import with_descending_sort
from astray.cli.help import read_pages
from astray.comparison.judge import thresholds

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "src" / "astray"
PAGES = sorted(DOCS.rglob("*.md"))
OUTSIDE = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
DESIGN = [ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((DOCS / "design").glob("*.md"))]
MADE = {
    "reference/commands.md",
    "reference/measurements.md",
    "reference/changelog.md",
    "design/architecture.md",
    "design/contributing.md",
}
"""Pages that the build makes; those of the API are in a folder of their own."""


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(path: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def nav() -> list[str]:
    return re.findall(r": (\S+\.md)$", (DOCS / "nav.yml").read_text(encoding="utf-8"), re.MULTILINE)


def test_every_page_stands_in_the_nav_once() -> None:
    pages = [page for page in nav() if page not in MADE and not page.startswith("reference/api/")]
    assert sorted(pages) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)
    assert len({Path(page).stem for page in pages}) == len(pages), "`astray help` knows pages by their names alone"


def test_the_site_is_built_from_that_nav_and_strictly() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert site["INHERIT"] == "docs/nav.yml"
    assert site["strict"] is True
    assert "nav" not in site
    assert site["theme"]["font"] is False  # fonts would come from the network


@pytest.mark.parametrize("page", [*PAGES, *OUTSIDE], ids=named)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", prose(page)):
        if "://" in target:
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.is_file(), f"{named(page)}: {target}"
        if anchor:
            assert anchor in headings(file), f"{named(page)}: {target}#{anchor}"


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them of its headings."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def module_paths(text: str) -> set[str]:
    """What looks like a file or a folder of the package: `stats/dtypes.py`, `capture/pytorch/native/`."""
    return {
        path
        for path in re.findall(r"`([\w./]+)`", text)
        if "/" in path and (path.endswith("/") or re.search(r"\.(py|h|c|cpp|pyi)$", path)) and ".." not in path
    }


@pytest.mark.parametrize("page", sorted({*DESIGN, *PAGES, ROOT / "README.md"}), ids=named)
def test_every_module_that_is_named_exists(page: Path) -> None:
    homes = [PACKAGE, ROOT]
    if page.name == "ARCHITECTURE.md":  # its table of rooms names folders within them
        homes += [room for room in PACKAGE.iterdir() if room.is_dir()]
    lines = "\n".join(line for line in prose(page).splitlines() if "→" not in line or line.startswith("|"))
    for path in module_paths(lines):
        assert any((home / path).exists() for home in homes), f"{named(page)}: {path}"


def way_of_one_tensor() -> list[Path]:
    """The modules that ARCHITECTURE.md names there, in order. A folder with a colon is that of those behind it."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.split("## The way of one tensor\n")[1].split("\n## ")[0]
    files = []
    for stage in re.findall(r"^\d\. (?:.+\n(?:   .+\n)*)", section, re.MULTILINE):
        folder = ""
        for name, colon in re.findall(r"`([\w./]+)`(:?)", stage):
            if colon and name.endswith("/"):
                folder = name
            elif re.search(r"\.(py|h|cpp)$", name):
                inside = PACKAGE / folder / name
                files.append(inside if inside.exists() else PACKAGE / name)
    return files


def test_the_way_of_one_tensor_is_there_and_never_turns_back() -> None:
    way = way_of_one_tensor()
    assert [str(file) for file in way if not file.is_file()] == []
    assert 40 < len(way) <= 60
    assert len(set(way)) == len(way)


def test_the_architecture_fits_two_pages() -> None:
    lines = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 130
    assert [line for line in lines if len(line) > 150] == []


def test_its_rooms_are_all_rooms() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("## Rooms")[1].split("\n## ")[0]
    cells = " ".join(re.findall(r"^\| (`.+?) \|", text, re.MULTILINE))
    rooms = {name.rstrip("/") for name in re.findall(r"`([\w./]+)`", cells)}
    there = {
        entry.name for entry in PACKAGE.iterdir() if not entry.name.startswith(("_", ".")) and entry.name != "py.typed"
    }
    assert rooms == there


def commands(page: Path) -> list[str]:
    """What a page shows of the command line: lines of its blocks of code, and code within a line."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix("$ ") for language, block in blocks if not language for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", prose(page))
    lines = [
        re.sub(r"^torchrun .*? -m astray | > \S+$", lambda cut: "" if ">" in cut[0] else "astray ", line)
        for line in lines
    ]
    return [
        line for line in lines if re.match(r"astray [a-z]+ ", line) and not re.search(r"…|\[options\]|COMMAND", line)
    ]


SHOWN = [page for page in [ROOT / "README.md", *PAGES] if commands(page)]


@pytest.mark.parametrize("page", SHOWN, ids=named)
def test_commands_are_those_of_the_parser(page: Path) -> None:
    for command in commands(page):
        words = with_descending_sort(shlex.split(command, comments=True)[1:])
        parser().parse_args(words)


def test_the_made_pages_have_what_they_are_made_of() -> None:
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("site_pages", DOCS / "site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    listed = made.commands_page()
    assert all(f"## astray {name}" in listed for name in parser().commands)
    assert "--keep WORDS" in listed
    text = made.api_page("astray")
    assert "### compare {#astray.compare}" in text
    assert "- `tolerances`: the largest relative errors to allow" in text
    assert (
        made.site_links("[a](../../ARCHITECTURE.md#rooms)", "guides/guard.md") == "[a](../design/architecture.md#rooms)"
    )
    assert made.site_links("[a](docs/start.md)", "design/architecture.md") == "[a](../start.md)"


def test_every_topic_is_a_page() -> None:
    pages = read_pages()
    assert next(iter(pages)) == "start"
    assert {page.section for page in pages.values()} == {
        "",
        "Guides",
        "Reference",
        "How it decides",
        "Coming from",
        "Design",
    }


def sources() -> str:
    files = [file for file in PACKAGE.rglob("*") if file.suffix in {".py", ".h", ".c", ".cpp"}]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def test_every_class_that_the_design_names_exists() -> None:
    words = set(re.findall(r"\w+", sources()))
    for page in DESIGN:
        for name in re.findall(r"`([A-Z]\w*[a-z]\w*(?:\.\w+)?)`", prose(page)):
            assert {*name.split(".")} <= words, f"{named(page)}: {name}"


def test_the_factors_of_verdicts_are_those_of_the_code() -> None:
    page = (DOCS / "decides" / "verdict.md").read_text(encoding="utf-8").split("noise run: factor")[1]
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|[^|]*\| ×(\d)[^|]*\| ([\d.]+) \|", page, re.MULTILINE)
    assert {name: float(factor) for name, factor, _, _ in rows} == thresholds.SIBLING_GAIN
    assert {name: float(factor) for name, _, factor, _ in rows} == thresholds.DRIFTED_GAIN
    assert {name: float(factor) for name, _, _, factor in rows} == thresholds.NOISE_GAIN
