"""The local server: every document of the workspace under an address of its own, behind `safety`.

Requests name rows and runs by number, never by path. Documents are made in threads, so that progress can be asked for
meanwhile. Exported tables are what `astray compare --csv` and `--xlsx` write, in a folder that is removed once sent.
"""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from astray.comparison.comparison import ComparisonData
from astray.comparison.measure.metrics import METRICS
from astray.comparison.select.pairs import Pairs
from astray.comparison.verdict import Verdict
from astray.errors import AstrayError, UsageError
from astray.report.csv import write_csv
from astray.report.xlsx import write_xlsx
from astray.web.connections import Connection, most_open
from astray.web.index import PageAssets, live_html
from astray.web.safety import AccessToken, CheckedApplication
from astray.web.views import ComparisonView
from astray.web.wire import Document, encode
from astray.web.workspace import Workspace, WorkspaceBusyError
from astray.wording import did_you_mean

LAST_PORT = 65535
WAITING = 128
"""The backlog: connections that wait to be accepted."""

_NO_TOKEN = "The token is missing or wrong. Open the address that astray view has printed."


MEDIA = {
    "csv": "text/csv; charset=utf-8",
    "xlsx": "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
}


_WORST_FIRST = (Verdict.NON_FINITE, Verdict.DIVERGED, Verdict.SHAPE, Verdict.DTYPE)
"""Of a site's wrong rows the one that stands for it: the weights of `page/src/marks.ts`."""


def application(desk: Workspace, page: PageAssets, keyring: AccessToken, host: str = "127.0.0.1") -> ASGIApp:
    """The whole server as an ASGI application."""
    answers = _Answers(desk, page, keyring)
    app = Starlette(
        routes=[
            Route("/", answers.index),
            Route("/static/page.js", answers.script),
            Route("/static/page.css", answers.style),
            Route("/api/session", answers.session),
            Route("/api/overview", answers.overview),
            Route("/api/columns", answers.columns),
            Route("/api/pair/{row:int}", answers.pair),
            Route("/api/run/{number}", answers.run),
            Route("/api/export.{kind}", answers.export),
            Route("/api/compare", answers.compare, methods=["POST"]),
            Route("/api/stop", answers.stop, methods=["POST"]),
        ],
        exception_handlers={AstrayError: _sentence, HTTPException: _sentence, Exception: _fault},
    )
    return CheckedApplication(app, keyring, host)


class _Answers:
    """One method for each address."""

    def __init__(self, desk: Workspace, page: PageAssets, keyring: AccessToken) -> None:
        self._desk = desk
        self._page = page
        self._keyring = keyring

    def index(self, request: Request) -> Response:
        token = request.query_params.get("token")
        if token is not None and self._keyring.fits(token):
            response: Response = RedirectResponse("/", 303)  # so that the token leaves the address
            self._keyring.give(response)
            return response
        if not self._keyring.is_shown_by(request.headers):
            return PlainTextResponse(_NO_TOKEN, 403)
        return HTMLResponse(live_html())

    def script(self, _: Request) -> Response:
        return Response(self._page.script, media_type="text/javascript")

    def style(self, _: Request) -> Response:
        return Response(self._page.style, media_type="text/css")

    def session(self, _: Request) -> Response:
        return _json(self._desk.session())

    def overview(self, _: Request) -> Response:
        shown = self._desk.shown
        return _json(shown.overview, shown.generation)

    def columns(self, _: Request) -> Response:
        shown = self._desk.shown
        return Response(shown.columns, media_type="application/octet-stream", headers=_generation(shown.generation))

    def pair(self, request: Request) -> Response:
        shown = self._desk.shown
        try:
            return _json(shown.pair(request.path_params["row"]), shown.generation)
        except UsageError as error:
            raise HTTPException(404, str(error)) from None

    def run(self, request: Request) -> Response:
        try:
            return _json(self._desk.shelf.document(request.path_params["number"]))
        except UsageError as error:
            raise HTTPException(404, str(error)) from None

    def export(self, request: Request) -> Response:
        kind = request.path_params["kind"]
        if kind not in MEDIA:
            raise HTTPException(404, f"There is no export as {kind!r:.40}; there are {', '.join(MEDIA)}.")
        view = self._desk.shown.view
        if not isinstance(view, ComparisonView):
            raise UsageError("Only the rows of a comparison are exported; of a run, `run.table()` has them.")
        asked = request.query_params
        chosen = asked.get("filter") or None, asked.get("sort") or None
        concluded = asked.get("conclusion") == "1"
        made = ExportedFile(view.comparison, kind, *chosen, conclusion=concluded, metric=asked.get("metric") or "error")
        gone = BackgroundTask(made.close)
        return FileResponse(made.path, media_type=MEDIA[kind], filename=f"pairs.{kind}", background=gone)

    async def compare(self, request: Request) -> Response:
        asked = await _asked(request)
        reference, candidate, noise = (asked.get(name) for name in ("reference", "candidate", "noise"))
        if not isinstance(reference, str) or not all(one is None or isinstance(one, str) for one in (candidate, noise)):
            raise HTTPException(400, "reference is the number of a run as a text, candidate and noise another or null.")
        begin: Callable[..., Any] = self._desk.look
        job = await run_in_threadpool(begin, reference, candidate, asked.get("options") or {}, noise)
        return JSONResponse({"job": job.document()}, 202)

    async def stop(self, request: Request) -> Response:
        await _asked(request)
        self._desk.stop()
        return JSONResponse({}, 202)


async def _asked(request: Request) -> Document:
    """The JSON of a request. Its size was bounded before."""
    try:
        found = json.loads(await request.body())
    except (ValueError, RecursionError):
        raise HTTPException(400, "The request is not JSON.") from None
    if not isinstance(found, dict):
        raise HTTPException(400, "The request is an object of JSON.")
    return found


def _json(document: Document | bytes, generation: int | None = None) -> Response:
    content = document if isinstance(document, bytes) else encode(document)
    headers = {} if generation is None else _generation(generation)
    return Response(content, media_type="application/json", headers=headers)


def _generation(number: int) -> dict[str, str]:
    """Which comparison a document belongs to."""
    return {"X-Generation": str(number)}


def _sentence(_: Request, error: Exception) -> Response:
    """What went wrong, in the words of the error."""
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code)
    return JSONResponse({"error": str(error)}, 409 if isinstance(error, WorkspaceBusyError) else 422)


def _fault(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": f"This is a fault in astray itself, please report it: {error!r}."}, 500)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on this address; port 0 is any that is free. Raises UsageError when it cannot be had."""
    with contextlib.ExitStack() as undone:
        try:
            if not 0 <= port <= LAST_PORT:
                raise OSError(f"ports end at {LAST_PORT}")
            family, _, _, _, place = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0]
            bound = undone.enter_context(socket.socket(family, socket.SOCK_STREAM))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(place)
            bound.listen(WAITING)  # connections made before the server has started wait
        except OSError as error:
            why = error.strerror or error
            raise UsageError(f"{host}:{port} cannot be listened on: {why}. Choose --host and --port.") from None
        undone.pop_all()
        return bound


def address(bound: socket.socket, host: str) -> str:
    """What to type into a browser, without the token."""
    name = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{bound.getsockname()[1]}/"


def server_of(app: ASGIApp) -> uvicorn.Server:
    """A server that logs nothing and holds no connection open for long."""
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="off",
        http=type("Connection", (Connection,), {"most": most_open()}),
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)


# -- exported tables ---------------------------------------------------------------------------------------------------


class ExportedFile:
    """A file, and the folder it lies in until `close`.

    conclusion: of each site that is wrong its worst row, by `metric`.
    """

    def __init__(
        self,
        comparison: ComparisonData,
        kind: str,
        filter: str | None,
        sort: str | None,
        conclusion: bool = False,
        metric: str = "error",
    ) -> None:
        if kind not in MEDIA:
            raise UsageError(f"There is no export as {kind!r:.40}; there are {', '.join(MEDIA)}.")
        pairs = comparison.select(filter, sort)
        if conclusion:
            pairs = concluded(comparison, pairs, bool(sort), metric)
        self._folder = tempfile.TemporaryDirectory(prefix="astray-")
        folder = Path(self._folder.name)
        try:
            if kind == "csv":
                self.path = write_csv(comparison, folder, pairs)[0]
            else:
                self.path = write_xlsx(comparison, folder / "pairs.xlsx", pairs)
        except BaseException:  # an interrupt too must leave no files; it goes on its way below
            self.close()
            raise

    def close(self) -> None:
        """Remove it."""
        self._folder.cleanup()


def concluded(comparison: ComparisonData, pairs: Pairs, ordered: bool, metric: str = "error") -> Pairs:
    """Of each site the worst row of these, in their order if they were `ordered`, else as the sites went wrong.

    metric: of rows with one verdict, by what they are the worst. Raises UsageError when there is no such column.
    """
    if metric not in comparison.pairs or comparison.pairs[metric].dtype.kind != "f":
        raise UsageError(f"There is no metric {metric!r:.40}.{did_you_mean(metric, METRICS)}")
    verdicts = comparison.pairs.coded("verdict").codes
    rows = np.sort(pairs.rows)
    rows = rows[np.isin(verdicts[rows], _WORST_FIRST)]
    site = comparison.pairs.coded("site").codes[rows]
    rank = np.array([_WORST_FIRST.index(Verdict(code)) for code in verdicts[rows].tolist()], np.int64)
    error = np.nan_to_num(comparison.pairs.numbers(metric)[rows] * (-1 if metric == "cosine" else 1), nan=-np.inf)
    worst = np.lexsort((rows, -error, rank))
    chosen = rows[worst[np.unique(site[worst], return_index=True)[1]]]  # in the order of the sites' codes
    began = np.unique(site, return_index=True)[1]
    chosen = pairs.rows[np.isin(pairs.rows, chosen)] if ordered else chosen[np.argsort(began)]
    asked = ", ".join(filter(None, (pairs.asked, "of each wrong site the worst")))
    return Pairs(pairs.columns, chosen, len(chosen), asked, pairs.named)
