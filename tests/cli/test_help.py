"""`astray help`: the pages of docs/, as text for a terminal and for a pipe, in every kind of installation."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import astray
from astray.cli import main, parser
from astray.cli.help import as_text, read_pages

ROOT = Path(__file__).parents[2]
PAGES = list(read_pages())


def test_a_bare_help_lists_every_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines() if line.startswith("  ")] == PAGES
    assert re.search(r"^Reference$\n  settings +Settings of a recording$", said, re.MULTILINE)
    assert sorted(PAGES) == sorted(page.stem for page in (ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("topic", PAGES)
@pytest.mark.parametrize("colour", [True, False])
def test_every_page_is_laid_out(topic: str, colour: bool) -> None:
    text = as_text(read_pages()[topic].text, 90, colour)
    for line in text.splitlines():
        seen = re.sub(r"\x1b\[[\d;]*m", "", line)
        assert "\x1b" not in seen
        assert not re.search(r"[\ue000-\ue002\u00a0]|\]\([a-z#]|\.md#|^\| ", seen), line
        # Code and tables of long words may be wider.
        assert len(seen) <= 90 or seen.startswith("    ") or "  " in seen, line
    assert ("\x1b" in text) == colour


def test_how_things_look() -> None:
    page = """# Title

Some `code with blanks` and **bold words**, a [page](guard.md#x), [metrics.md](../reference/metrics.md),
[RESULTS.md](../../benchmarks/RESULTS.md) and [there](https://x.org/a#b).
![a picture](images/page.png)

- one point
  that goes on
  - and one inside

| name | what |
|---|---|
| `a \\| b` | a long text that has to be folded into lines |
| [`x`](#x) | |

```python
kept = "as it is"  # [link](x.md) **no**
```
"""
    assert (
        as_text(page, 44, False)
        == """\
Title
=====

Some `code with blanks` and bold words, a
page (`astray help guard`),
`astray help metrics`, RESULTS.md and there
(https://x.org/a#b).

• one point that goes on
  • and one inside

name     what
───────  ───────────────────────────────────
`a | b`  a long text that has to be folded
         into lines
`x`

    kept = "as it is"  # [link](x.md) **no**"""
    )
    coloured = as_text(page, 44, True)
    assert "\x1b[1mcode with blanks\x1b[0m and \x1b[1mbold\x1b[0m \x1b[1mwords\x1b[0m," in coloured
    assert "`" not in coloured


def test_a_topic_may_be_a_file_or_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for topic in ("guard", "guard.md", "docs/guides/guard.md", "moving-from-guard"):
        assert main(["help", topic]) == 0
        outputs.append(capsys.readouterr().out)
    assert len(set(outputs)) == 1
    assert main(["help", "compare"]) == 0
    assert capsys.readouterr().out.startswith("usage: astray compare ")


def test_a_wrong_topic_is_told_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "gaurd"]) == 2
    assert "There is no topic 'gaurd'. Did you mean 'guard'?" in capsys.readouterr().err


def test_what_a_user_reads_names_no_file_that_a_wheel_lacks() -> None:
    """Options, messages and the docstrings of public names; `astray help` has them all."""
    for name, command in parser().commands.items():
        assert "docs/" not in command.format_help(), name
    for module in (astray, astray.state, astray.experiment, astray.errors):
        for name in module.__all__:
            assert "docs/" not in (getattr(module, name).__doc__ or ""), name
    package = Path(astray.__file__).parent
    for file in package.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        documented = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        documented |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
                assert not re.search(r"docs/[\w/-]+\.md", node.value), f"{file}: {node.value!r}"


def test_every_topic_that_is_named_is_there() -> None:
    package = Path(astray.__file__).parent
    for file in package.rglob("*.py"):
        for topic in re.findall(r"`astray help ([a-z-]+)", file.read_text(encoding="utf-8")):
            assert topic in PAGES, f"{file}: {topic}"


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="there are no pseudo-terminals here")
def test_a_terminal_gets_colours_and_a_pager() -> None:
    import pty

    leader, follower = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "PAGER": "tail -n 1000", "LINES": "10"}
    env.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "astray", "help", "view"]
    done = subprocess.run(command, env=env, stdin=follower, stdout=follower, check=False)
    os.close(follower)
    text = b""
    with os.fdopen(leader, "rb", buffering=0) as output:
        try:
            while part := output.read(65536):
                text += part
        except OSError:  # the other end is closed
            pass
    assert done.returncode == 0
    assert b"\x1b[33;1mThe page\x1b[0m" in text


@pytest.mark.slow
def test_a_wheel_has_the_pages_and_the_checkout_no_copy(tmp_path: Path) -> None:
    env = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, env=env, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    packed = {name.removeprefix("astray/docs/") for name in names if name.startswith("astray/docs/")}
    assert packed == {"nav.yml"} | {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    env["PYTHONPATH"] = str(tmp_path / "site")
    code = "import astray; from astray.cli import main; assert 'site' in astray.__file__; main(['help', 'risk'])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("Overflow and underflow: risk before it happens\n=====")
    assert not (ROOT / "src" / "astray" / "docs").exists()
