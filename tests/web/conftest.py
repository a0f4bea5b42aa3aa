"""A real browser, real runs and a real server for the tests of the page.

The runs are of a small network; from step 1 on one element of what `body.up` gives is wrong in the second.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

WRONG = (1, 2, 3)
"""The index of the element that the fault changes, by 0.5."""

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


class Runs(NamedTuple):
    good: Path
    bad: Path
    broken: Path  # holds infinities from step 2 on


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Three recordings of one program: as it should be, with the fault, and one that overflows."""
    home = tmp_path_factory.mktemp("runs")
    found = Runs(home / "good", home / "bad", home / "broken")
    _train(found.good)
    _train(found.bad, fault=0.5)
    _train(found.broken, fault=float("inf"), at=2)
    return found


def _train(path: Path, fault: float = 0.0, at: int = 1) -> None:
    import torch
    from torch import nn

    import astray

    class Up(nn.Linear):
        step = 0

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            made = super().forward(input)
            return made + self.blow if self.step >= at and fault else made

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.act, self.down = Up(6, 8), nn.GELU(), nn.Linear(8, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(self.act(self.up(x)))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.body, self.head = nn.Linear(6, 6), Body(), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(self.first(x)))

    torch.manual_seed(0)
    net = Net()
    Up.blow = torch.zeros(2, 4, 8).index_put(tuple(torch.tensor(at) for at in WRONG), torch.tensor(fault))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with astray.record(path, net, keep="tensors") as recording:
        for step in range(3):
            Up.step = step
            optimizer.zero_grad()
            net(torch.randn(2, 4, 6)).square().mean().backward()
            optimizer.step()
            recording.step()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, BROWSERS)))
    quick = ["--in-process-gpu"]  # a process less to start and to talk to
    alone = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []  # root has no sandbox
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=quick + alone)
        yield browser
        browser.close()


class Window:
    """A tab, and everything that its console complained of."""

    def __init__(self, tab: Any) -> None:
        self.tab = tab
        self.complaints: list[str] = []
        self.open = self.kept = ""  # the address of a page that this test, and the next, may go on with
        tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        tab.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)

    def rows(self) -> list[int]:
        """The numbers of the rows that are in the document, from top to bottom."""
        return [
            int(text)
            for text in self.tab.eval_on_selector_all(".grid [data-row]", "all => all.map(x => x.dataset.row)")
        ]

    def count(self) -> str:
        return str(self.tab.text_content("[data-test=count]"))

    def hash(self) -> str:
        return str(self.tab.evaluate("location.hash"))


@pytest.fixture(scope="session")
def one_window(chromium: Any) -> Window:
    """A tab of a laptop's size. Opening one for every test would take as long as the tests."""
    context = chromium.new_context(viewport={"width": 1280, "height": 800}, accept_downloads=True)
    context.set_default_timeout(20_000)
    return Window(context.new_page())


@pytest.fixture
def window(one_window: Window) -> Iterator[Window]:
    """The tab, as if it were new. What it complains of fails the test, unless the test empties `complaints`."""
    tab = one_window.tab
    one_window.complaints.clear()
    one_window.open, one_window.kept = one_window.kept, ""
    yield one_window
    if not one_window.kept:
        tab.unroute_all()
        tab.emulate_media(color_scheme="light")
        if not tab.url.startswith("about:"):
            tab.evaluate("localStorage.clear()")
        tab.goto("about:blank")
        tab.context.set_offline(False)
    assert one_window.complaints == []


class Served(NamedTuple):
    address: str  # with the token
    workspace: Any
    server: Any


@contextmanager
def serve(*runs: Path) -> Iterator[Served]:
    """A server that shows runs, as `astray view` starts it."""
    from astray.web.html import read_page
    from astray.web.run_list import RunList
    from astray.web.safety import AccessToken
    from astray.web.server import address, application, listen, server_of
    from astray.web.workspace import Workspace

    workspace, access_token = Workspace(RunList(runs)), AccessToken()
    with listen("127.0.0.1", 0) as bound:
        server = server_of(application(workspace, read_page(), access_token))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        yield Served(f"{address(bound, '127.0.0.1')}?token={access_token.token}", workspace, server)
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def served(trained: Runs) -> Iterator[Served]:
    """The comparison of the good run with the bad one."""
    with serve(*trained) as one:
        one.workspace.open("0", "1", {}).wait()
        yield one


@pytest.fixture(scope="session")
def serving() -> Callable[..., AbstractContextManager[Served]]:
    """Serves other runs."""
    return serve


@pytest.fixture(scope="session")
def report(trained: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The comparison as one file."""
    import astray

    return astray.compare(trained.good, trained.bad).to_html(tmp_path_factory.mktemp("report") / "report.html")
