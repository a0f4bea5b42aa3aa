"""Pages of the site that are made when it is built, and pages from outside of docs/; a hook of mkdocs (mkdocs.yml).

Made are the command line, from the parsers of `astray.cli`, and the Python API, from signatures and docstrings. Files
outside of docs/ (ARCHITECTURE.md, benchmarks/RESULTS.md, …) become pages, and links to it are turned to these. mkdocs
is imported only where mkdocs calls, so that tests can read this file without it.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import os
import posixpath
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

OUTSIDE = {
    "README.md": "start.md",
    "ARCHITECTURE.md": "design/architecture.md",
    "CONTRIBUTING.md": "design/contributing.md",
    "CHANGELOG.md": "reference/changelog.md",
    "benchmarks/RESULTS.md": "reference/measurements.md",
}
"""Markdown outside of docs/, and its page in the site. For README.md that is the start page, which has its own text."""

API = {
    "reference/api/astray.md": ("astray",),
    "reference/api/state.md": ("astray.state",),
    "reference/api/experiment.md": ("astray.experiment",),
    "reference/api/errors.md": ("astray.errors",),
    "reference/api/others.md": ("astray.checkpoints", "astray.nonfinite", "astray.transformers"),
    "reference/api/compat.md": (
        "astray.compat.msprobe",
        "astray.compat.torch_npu",
        "astray.compat.hooktools",
        "astray.compat.saving_hook",
        "astray.compat.nnstat",
    ),
}
"""The pages of the API and the public modules on each, which are listed by the names in their `__all__`."""

LINK = re.compile(r"(?<=\]\()([^)#\s]+)(?=[)#])")


def on_files(files: Any, config: Any) -> Any:
    """mkdocs: adds the pages that are not in docs/, and makes the start page the site's first."""
    from mkdocs.structure.files import File

    made = {"reference/commands.md": commands_page()} | {page: api_page(*modules) for page, modules in API.items()}
    made |= {page: (ROOT / path).read_text(encoding="utf-8") for path, page in OUTSIDE.items() if page != "start.md"}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    start = files.get_file_from_path("start.md")
    start.name, start.dest_uri, start.url = "index", "index.html", "index.html"
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """mkdocs: turns links between files of the repository into links between pages of the site."""
    return site_links(markdown, page.file.src_uri)


def site_links(markdown: str, page: str) -> str:
    """The text of a page with its links to files of the repository as links to pages of the site."""
    source = next((path for path, target in OUTSIDE.items() if target == page != "start.md"), f"docs/{page}")

    def turned(match: re.Match[str]) -> str:
        target = match[1]
        if "://" in target or target.startswith("mailto:"):
            return target
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        where = OUTSIDE.get(path, path.removeprefix("docs/"))
        return posixpath.relpath(where, posixpath.dirname(page) or ".")

    return LINK.sub(turned, markdown)


def commands_page() -> str:
    """Every command with its options, as its parser prints them."""
    from astray.cli import parser

    os.environ["COLUMNS"] = "100"  # what argparse folds its lines to
    main = parser()
    parts = ["# Command line", _fenced(main.format_help())]
    for name, command in main.commands.items():
        parts += [f"## astray {name}", _fenced(command.format_help())]
    return "\n\n".join(parts)


def api_page(*modules: str) -> str:
    """The public names of these modules, with signature and docstring."""
    parts = [f"# {modules[0] if len(modules) == 1 else _TITLES[modules[0]]}"]
    for name in modules:
        module = importlib.import_module(name)
        parts += [f"## {name}" if len(modules) > 1 else "", docstring(inspect.getdoc(module) or "")]
        public = {member: getattr(module, member) for member in module.__all__}
        for member, value in public.items():
            parts += _described(member, value, name, [other for other in public.values() if inspect.isclass(other)])
    return "\n\n".join(part for part in parts if part)


_TITLES = {"astray.checkpoints": "Other modules", "astray.compat.msprobe": "astray.compat"}


def _described(name: str, value: Any, module: str, classes: list[type]) -> Iterator[str]:
    """A heading, the signature, the docstring; of a class its public methods and attributes too.

    classes: those on the page. What a class inherits from one of them is described there.
    """
    yield f"### {name} {{#{module}.{name}}}"
    if inspect.isclass(value):
        yield _signature(name, value)
        yield docstring(inspect.getdoc(value) or "")
        bases = [base for base in value.__mro__[1:] if base in classes]
        if bases:
            yield f"Has all that `{bases[0].__name__}` has."
        yield from _members(name, value, {member for base in bases for member in dir(base)})
    elif inspect.ismodule(value):
        yield f"The module `{value.__name__}`."
    elif callable(value):
        yield _signature(name, value)
        yield docstring(inspect.getdoc(value) or "")
    else:
        yield f"`{value!r}`"


def _members(name: str, value: type, inherited: set[str]) -> Iterator[str]:
    bare: list[str] = []
    attributes: list[str] = []
    methods: list[str] = []
    for member, function in inspect.getmembers(value):
        if member.startswith("_") or member in inherited or not _is_ours(function):
            continue
        text = docstring(inspect.getdoc(function) or "")
        if inspect.isroutine(function):
            methods += [_signature(f"{name}.{member}", function), text]
        elif text:
            attributes.append(f"**`{name}.{member}`**: {text}")
        else:
            bare.append(f"`{member}`")
    if bare:
        yield f"Attributes: {', '.join(bare)}."
    yield from attributes
    yield from methods


def _is_ours(function: Any) -> bool:
    if not inspect.isroutine(function) and not isinstance(function, property | functools.cached_property):
        return False
    function = getattr(function, "func", function)
    function = getattr(function, "fget", None) or function
    return str(getattr(inspect.unwrap(function), "__module__", "")).startswith("astray")


def _signature(name: str, value: Any) -> str:
    try:
        given = inspect.signature(value)
    except (TypeError, ValueError):  # an exception that takes what all take
        return ""
    parameters = [
        part.replace(annotation=_named(part.annotation)) for part in given.parameters.values() if part.name != "self"
    ]
    returned = given.empty if inspect.isclass(value) else given.return_annotation
    line = f"{name}{given.replace(parameters=parameters, return_annotation=_named(returned))}"
    if len(line) > 96:
        inside = ",\n    ".join(str(part) for part in parameters)
        arrow = "" if returned is given.empty else f" -> {_named(returned)}"
        line = f"{name}(\n    {inside},\n){arrow}"
    return _fenced(line, "python")


class _Named:
    """An annotation that prints as it is written in the source."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _named(annotation: Any) -> Any:
    return _Named(annotation) if isinstance(annotation, str) else annotation


_FILES = re.compile(r"\w+(\.py|/)  ")  # a package's list of its files, which is for who reads the source
_ENTRY = re.compile(r"((?:\*{0,2}\w+, )*\*{0,2}\w+): (.+)", re.DOTALL)


def docstring(text: str) -> str:
    """A docstring as Markdown: paragraphs, examples as code, and lines such as `steps: which steps` as a list."""
    blocks = []
    for block in re.split(r"\n\s*\n", text):
        lines = block.splitlines()
        if not block.strip() or _FILES.match(block):
            continue
        if all(line.startswith("    ") or not line for line in lines):
            code = textwrap.dedent(block)
            blocks.append(_fenced(code, "python" if _is_python(code) else "text"))
        elif lines[0].startswith(">>>"):
            blocks.append(_fenced(block, "pycon"))
        else:
            blocks.append(_entries(lines) if blocks else " ".join(map(_plain, lines)))
    return "\n\n".join(blocks)


def _is_python(code: str) -> bool:
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


def _entries(lines: list[str]) -> str:
    """A paragraph, or a list of `name: meaning` where every line that is not indented is one or goes on with one."""
    entries: list[str] = []
    for line in lines:
        if _ENTRY.fullmatch(line) or not entries:
            entries.append(line)
        else:
            entries[-1] += f"\n{line}"
    matches = [_ENTRY.fullmatch(entry) for entry in entries]
    if not all(matches):
        return " ".join(map(_plain, lines))
    return "\n".join(f"- `{match[1]}`: {_plain(' '.join(match[2].split()))}" for match in matches if match)


def _plain(text: str) -> str:
    """Text in which nothing but backticks has a meaning."""
    parts = re.split(r"(`[^`]*`)", text.strip())
    return "".join(part if part.startswith("`") else re.sub(r"([*_<\[\]#|])", r"\\\1", part) for part in parts)


def _fenced(text: str, language: str = "text") -> str:
    return f"```{language}\n{text.rstrip()}\n```"


if __name__ == "__main__":  # what the site's made pages look like, without building it
    chosen = argparse.ArgumentParser(description=__doc__)
    chosen.add_argument("module", nargs="*", help="public modules; the commands without any")
    modules = chosen.parse_args().module
    print(api_page(*modules) if modules else commands_page())
