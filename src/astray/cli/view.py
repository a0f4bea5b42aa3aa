"""`astray view`: a local page to look at one run, at two side by side, or to choose among those in a folder."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import threading
from typing import Any

from astray.cli.compare import add_comparison_options

_PAGE_OPTIONS = ("steps", "ranks", "sites", "tolerance", "exact", "by", "shapes", "micro", "offset")
"""The options that can be changed in the page; the others name files or programs, and apply to every comparison."""


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "view",
        help="look at a run, or at two side by side, in a browser",
        description="Serves a page about one run, or about the comparison of two, on this machine alone. Of a folder, "
        "the runs in it can be chosen in the page. It goes on until Ctrl-C.",
        epilog="Exit code: 0 when it was ended, 2 when it could not be served.",
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="the run; the one that is right and the one in question; or a folder"
    )
    serving = parser.add_argument_group("serving")
    serving.add_argument("--port", type=int, default=0, metavar="N", help="listen there (default: any that is free)")
    serving.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="NAME",
        help="listen on this address (default 127.0.0.1: this machine only)",
    )
    serving.add_argument("--no-browser", action="store_true", help="print the address and open no browser")
    add_comparison_options(parser)
    parser.set_defaults(main=main)


def main(options: argparse.Namespace) -> int:
    from astray.web.html import read_page

    page = read_page()
    server = _server()
    from astray.results.comparison import REPLAYER
    from astray.web.run_list import RunList
    from astray.web.safety import AccessToken
    from astray.web.workspace import Workspace

    run_list = RunList(options.runs)
    workspace = Workspace(run_list, _fixed(options), None if options.no_replay else REPLAYER)
    token = AccessToken()
    with server.listen(options.host, options.port) as bound:
        if len(run_list) == len(run_list.named) <= 2:
            workspace.open(run_list.named[0], run_list.named[1] if len(run_list) == 2 else None, _page_options(options))
        address = f"{server.address(bound, options.host)}?token={token.token}"
        print(f"astray view: {address}\nCtrl-C ends it.", file=sys.stderr, flush=True)
        if not options.no_browser and _has_browser():
            _open(address)
        running = server.server_of(server.application(workspace, page, token, options.host))
        try:
            running.run(sockets=[bound])
        except KeyboardInterrupt:  # the usual way to end it
            pass
        finally:
            workspace.stop()
    return 0


def _server() -> Any:
    """The module of the server, whose packages are optional."""
    from astray.errors import UsageError

    try:
        return importlib.import_module("astray.web.server")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("astray"):
            raise
        raise UsageError(
            f"The page is served by Starlette and uvicorn; {error.name} is not installed: pip install 'astray[web]'. "
            "`astray compare REFERENCE CANDIDATE --html FILE` writes it as a file without them."
        ) from None


def _page_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options the page starts with, as it would send them."""
    values = {name: getattr(options, name) for name in _PAGE_OPTIONS}
    defaults = {"by": "auto", "shapes": "judged", "micro": "paired", "offset": 0, "exact": False}
    return {name: value for name, value in values.items() if value is not None and value != defaults.get(name)}


def _fixed(options: argparse.Namespace) -> dict[str, Any]:
    arguments = {
        "mapping": options.map,
        "noise": options.noise,
        "metrics": options.metric,
        "processes": options.processes,
    }
    arguments["allow_missing"] = options.allow_missing or None
    return {name: value for name, value in arguments.items() if value is not None}


def _has_browser() -> bool:
    """Whether a window could open here: not over ssh, and not where there is no screen."""
    if os.environ.get("BROWSER"):
        return True
    if os.environ.get("SSH_CONNECTION"):
        return False
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _open(address: str) -> None:
    """Opens it in a browser, half a second later and in a thread: some browsers return only when they are closed."""
    import webbrowser

    timer = threading.Timer(0.5, webbrowser.open, [address])
    timer.daemon = True
    timer.start()
