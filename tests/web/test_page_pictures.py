"""The pictures of the documentation, taken of the page as it is: ASTRAY_UPDATE_PICTURES=1 writes them to docs/images.

They show what `make demo` records, with values. Without that variable they are taken all the same, and must show what
the texts say of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from astray import compare

pytestmark = [pytest.mark.browser, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
SCRIPT = "examples/train_gpt.py"
LARGEST = 600_000  # bytes: they lie in the repository


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs of the demonstration, and the report of the comparison of the first two."""
    home = tmp_path_factory.mktemp("demo")
    for name, arguments in (("good", []), ("bad", ["--fault"]), ("infinite", ["--by-hand", "--lr", "1"])):
        command = ["-m", "astray", "run", "-o", str(home / name), "--keep", "tensors", SCRIPT, *arguments]
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)
    compare(home / "good", home / "bad").to_html(home / "report.html")
    return home


Snap = Callable[[str], None]


@pytest.fixture
def sharp(chromium: Any, tmp_path: Path) -> Iterator[tuple[Any, Snap]]:
    """A tab with more than one dot to a pixel, and what takes a picture of it."""
    context = chromium.new_context(viewport={"width": 1280, "height": 800}, device_scale_factor=1.5)
    tab = context.new_page()

    def snap(name: str) -> None:
        update = os.environ.get("ASTRAY_UPDATE_PICTURES")
        file = (ROOT / "docs" / "images" if update else tmp_path) / f"{name}.png"
        tab.mouse.move(0, 0)
        tab.screenshot(path=str(file))
        assert 20_000 < file.stat().st_size < LARGEST

    yield tab, snap
    context.close()


def test_the_comparison(sharp: tuple[Any, Snap], demo: Path) -> None:
    tab, snap = sharp
    tab.goto((demo / "report.html").as_uri())
    tab.wait_for_selector(".grid [data-row]")
    assert "First divergence: step 3, forward, call 0 of h.2.mlp.proj (Linear), output" in tab.inner_text("h1")
    snap("page")
    tab.click("h1 button")
    tab.wait_for_selector("[data-test=worst]")
    tab.emulate_media(color_scheme="dark")
    tab.evaluate("document.querySelector('[data-test=worst]').closest('.section').scrollIntoView()")
    tab.wait_for_selector("[data-test=heat]")
    snap("page-pair")


def test_one_run(sharp: tuple[Any, Snap], demo: Path, serving: Any) -> None:
    tab, snap = sharp
    with serving(demo / "infinite") as served:
        served.workspace.open("0", None, {}).wait()
        tab.goto(served.address)
        tab.click("h1 button")
        tab.wait_for_selector("[data-test=lines] canvas")
        assert "NaN or infinity" in tab.inner_text(".over-steps")
        snap("page-run")
