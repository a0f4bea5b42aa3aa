"""The local server: every document of the workspace at an address of its own, behind the checks of `safety`.

Requests identify rows and runs by number, never by path. Documents are made in threads, so that progress can be
requested meanwhile. Exported tables are what `astray compare --csv` and `--xlsx` write, in a folder that is removed
once they are sent.
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
from astray.web.html import PageAssets, live_html
from astray.web.safety import AccessToken, CheckedApplication, Connection, most_open
from astray.web.views import ComparisonView
from astray.web.wire import Document, encode
from astray.web.workspace import Workspace, WorkspaceBusyError
from astray.wording import did_you_mean

LAST_PORT = 65535
BACKLOG = 128
"""Connections that wait to be accepted."""

_NO_TOKEN = "The token is missing or wrong. Open the address that astray view has printed."


MEDIA = {
    "csv": "text/csv; charset=utf-8",
    "xlsx": "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
}


_WORST_FIRST = (Verdict.NON_FINITE, Verdict.DIVERGED, Verdict.SHAPE, Verdict.DTYPE)
"""The order by which the worst of a site's rows is chosen, as by the weights of `page/src/marks.ts`."""


def application(workspace: Workspace, page: PageAssets, token: AccessToken, host: str = "127.0.0.1") -> ASGIApp:
    """The whole server as an ASGI application."""
    answers = _Handlers(workspace, page, token)
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
        exception_handlers={AstrayError: _error_response, HTTPException: _error_response, Exception: _fault_response},
    )
    return CheckedApplication(app, token, host)


class _Handlers:
    """One method for each address."""

    def __init__(self, workspace: Workspace, page: PageAssets, token: AccessToken) -> None:
        self._workspace = workspace
        self._page = page
        self._token = token

    def index(self, request: Request) -> Response:
        token = request.query_params.get("token")
        if token is not None and self._token.fits(token):
            response: Response = RedirectResponse("/", 303)  # so that the token leaves the address
            self._token.set_cookie(response)
            return response
        if not self._token.is_shown_by(request.headers):
            return PlainTextResponse(_NO_TOKEN, 403)
        return HTMLResponse(live_html())

    def script(self, _: Request) -> Response:
        return Response(self._page.script, media_type="text/javascript")

    def style(self, _: Request) -> Response:
        return Response(self._page.style, media_type="text/css")

    def session(self, _: Request) -> Response:
        return _json(self._workspace.session())

    def overview(self, _: Request) -> Response:
        shown = self._workspace.shown
        return _json(shown.overview, shown.generation)

    def columns(self, _: Request) -> Response:
        shown = self._workspace.shown
        return Response(shown.columns, media_type="application/octet-stream", headers=_generation(shown.generation))

    def pair(self, request: Request) -> Response:
        shown = self._workspace.shown
        try:
            return _json(shown.pair(request.path_params["row"]), shown.generation)
        except UsageError as error:
            raise HTTPException(404, str(error)) from None

    def run(self, request: Request) -> Response:
        try:
            return _json(self._workspace.runs.document(request.path_params["number"]))
        except UsageError as error:
            raise HTTPException(404, str(error)) from None

    def export(self, request: Request) -> Response:
        kind = request.path_params["kind"]
        if kind not in MEDIA:
            raise HTTPException(404, f"There is no export as {kind!r:.40}; there are {', '.join(MEDIA)}.")
        view = self._workspace.shown.view
        if not isinstance(view, ComparisonView):
            raise UsageError("Only the rows of a comparison are exported; of a run, `run.table()` has them.")
        query = request.query_params
        file = ExportedFile(
            view.comparison,
            kind,
            query.get("filter") or None,
            query.get("sort") or None,
            conclusion=query.get("conclusion") == "1",
            metric=query.get("metric") or "error",
        )
        cleanup = BackgroundTask(file.close)
        return FileResponse(file.path, media_type=MEDIA[kind], filename=f"pairs.{kind}", background=cleanup)

    async def compare(self, request: Request) -> Response:
        content = await _json_of(request)
        reference, candidate, noise = (content.get(name) for name in ("reference", "candidate", "noise"))
        others = (candidate, noise)
        if not isinstance(reference, str) or not all(run is None or isinstance(run, str) for run in others):
            raise HTTPException(400, "reference is the number of a run as a text, candidate and noise another or null.")
        begin: Callable[..., Any] = self._workspace.open
        job = await run_in_threadpool(begin, reference, candidate, content.get("options") or {}, noise)
        return JSONResponse({"job": job.document()}, 202)

    async def stop(self, request: Request) -> Response:
        await _json_of(request)
        self._workspace.stop()
        return JSONResponse({}, 202)


async def _json_of(request: Request) -> Document:
    """The JSON of a request. Its size was bounded before."""
    try:
        content = json.loads(await request.body())
    except (ValueError, RecursionError):
        raise HTTPException(400, "The request is not JSON.") from None
    if not isinstance(content, dict):
        raise HTTPException(400, "The request is an object of JSON.")
    return content


def _json(document: Document | bytes, generation: int | None = None) -> Response:
    content = document if isinstance(document, bytes) else encode(document)
    headers = {} if generation is None else _generation(generation)
    return Response(content, media_type="application/json", headers=headers)


def _generation(number: int) -> dict[str, str]:
    """Which comparison a document belongs to."""
    return {"X-Generation": str(number)}


def _error_response(_: Request, error: Exception) -> Response:
    """The answer to a request that an error has ended, with the text of the error."""
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code)
    return JSONResponse({"error": str(error)}, 409 if isinstance(error, WorkspaceBusyError) else 422)


def _fault_response(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": f"This is a fault in astray itself, please report it: {error!r}."}, 500)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on this address; port 0 is any free one. Raises UsageError when that is not possible."""
    with contextlib.ExitStack() as cleanup:
        try:
            if not 0 <= port <= LAST_PORT:
                raise OSError(f"ports end at {LAST_PORT}")
            family, _, _, _, address = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0]
            bound = cleanup.enter_context(socket.socket(family, socket.SOCK_STREAM))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(BACKLOG)  # connections made before the server has started wait
        except OSError as error:
            why = error.strerror or error
            raise UsageError(f"{host}:{port} cannot be listened on: {why}. Choose --host and --port.") from None
        cleanup.pop_all()
        return bound


def address(bound: socket.socket, host: str) -> str:
    """The address for a browser, without the token."""
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
    """A file in a temporary folder, which `close` removes.

    conclusion: only the worst row of each site that is wrong, by `metric`.
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
            pairs = worst_of_sites(comparison, pairs, bool(sort), metric)
        self._folder = tempfile.TemporaryDirectory(prefix="astray-")
        folder = Path(self._folder.name)
        try:
            if kind == "csv":
                self.path = write_csv(comparison, folder, pairs)[0]
            else:
                self.path = write_xlsx(comparison, folder / "pairs.xlsx", pairs)
        except BaseException:  # an interrupt too must leave no files
            self.close()
            raise

    def close(self) -> None:
        """Removes the folder."""
        self._folder.cleanup()


def worst_of_sites(comparison: ComparisonData, pairs: Pairs, ordered: bool, metric: str = "error") -> Pairs:
    """The worst of these rows for each site, in their order if they are `ordered`, else as the sites went wrong.

    metric: which of several rows with one verdict is the worst. Raises UsageError when there is no such column.
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
    first_rows = np.unique(site, return_index=True)[1]
    chosen = pairs.rows[np.isin(pairs.rows, chosen)] if ordered else chosen[np.argsort(first_rows)]
    description = ", ".join(filter(None, (pairs.asked, "of each wrong site the worst")))
    return Pairs(pairs.columns, chosen, len(chosen), description, pairs.named)
