"""The server as a browser uses it, and as an intruder would: real requests to a real socket."""

from __future__ import annotations

import contextlib
import csv
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openpyxl
import pytest

from astray import compare
from astray.comparison import comparison as comparing
from astray.errors import UsageError
from astray.records import Call, Tensor
from astray.results.comparison import REPLAYER
from astray.stats.kernels import Strided, measure
from astray.store import RunInfo, RunWriter, open_run
from astray.web import safety
from astray.web import workspace as workspace_module
from astray.web.detail import detail_of
from astray.web.html import PageAssets
from astray.web.overview import overview_of
from astray.web.run_list import RunList
from astray.web.safety import HEADERS, MOST_BODY, AccessToken, names_of
from astray.web.server import address, application, listen, server_of
from astray.web.views import ComparisonView
from astray.web.wire import encode, pack
from astray.web.workspace import Workspace
from page_documents import HOSTILE

PAGE = PageAssets("let page = '<script>';\n", "body { margin: 0 }\n")
JSON = {"Content-Type": "application/json", "X-Astray": "1"}


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)


class Client:
    """A server in a thread, and a client."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.access_token = AccessToken()
        self.socket = listen("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self._server = server_of(application(workspace, PAGE, self.access_token))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self.socket]}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        self.socket.close()

    def ask(
        self,
        path: str,
        method: str = "GET",
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        cookie: str | None = "right",
    ) -> Answer:
        asked = {"Host": f"127.0.0.1:{self.port}", **(headers or {})}
        if cookie is not None:
            asked["Cookie"] = (
                f"other={{[]}}; x; {self.access_token.name}={self.access_token.token if cookie == 'right' else cookie}"
            )
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.putrequest(method, path, skip_host=True)
            for name, value in asked.items():
                connection.putheader(name, value)
            if body is not None:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def post(self, path: str, document: Any, **rest: Any) -> Answer:
        return self.ask(path, "POST", json.dumps(document).encode(), {**JSON, **rest.pop("headers", {})}, **rest)

    def until_done(self) -> dict[str, Any]:
        while (session := self.ask("/api/session").document)["job"]["state"] == "running":
            time.sleep(0.01)
        return session


@pytest.fixture(scope="module")
def client(trained: Any) -> Iterator[Client]:
    """The comparison of two runs of three that were given."""
    found = Client(Workspace(RunList(trained), replayer=REPLAYER))
    found.workspace.open("0", "1", {}).wait(60)
    yield found
    found.close()


@pytest.fixture
def choosing(trained: Any) -> Iterator[Client]:
    """A folder of runs, of which none is chosen yet."""
    found = Client(Workspace(RunList([trained.good.parent])))
    yield found
    found.close()


# What a browser sees.


def test_the_token_becomes_a_cookie_and_leaves_the_address(client: Client):
    answer = client.ask(f"/?token={client.access_token.token}", cookie=None)
    assert (answer.status, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"{client.access_token.name}={client.access_token.token};")
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    page = client.ask("/")
    assert page.status == 200
    assert page.headers["content-type"].startswith("text/html")
    assert client.access_token.token.encode() not in page.body
    assert b"<script>" not in page.body  # no script but the one of its own file


def test_every_answer_binds_the_browser(client: Client):
    for path, cookie in (("/", "right"), ("/api/session", "right"), ("/api/session", None), ("/nowhere", "right")):
        answer = client.ask(path, cookie=cookie)
        for name, value in HEADERS.items():
            assert answer.headers[name.lower()] == value, (path, name)
        assert "server" not in answer.headers
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy


def test_the_script_and_the_styles(client: Client):
    assert client.ask("/static/page.js").body == PAGE.script.encode()
    assert client.ask("/static/page.css").headers["content-type"].startswith("text/css")


def test_documents_are_those_of_the_view(client: Client, trained: Any):
    view = ComparisonView(compare(trained.good, trained.bad))
    session = client.ask("/api/session").document
    assert (session["kind"], session["reference"], session["candidate"]) == ("comparison", "0", "1")
    assert [run["label"] for run in session["runs"]] == ["good", "bad", "broken"]
    assert session["runs"][0]["steps"] == [0, 1, 2]
    overview = client.ask("/api/overview")
    assert overview.body == encode(overview_of(view))
    assert overview.headers["x-generation"] == str(session["generation"])
    assert client.ask("/api/columns").body == pack(view.table)
    row = overview.document["first"]["row"]
    assert client.ask(f"/api/pair/{row}").body == encode(detail_of(view, row))
    assert client.ask(f"/api/pair/{row}").body == encode(detail_of(view, row))  # and once more, from memory


def test_exports_are_those_of_the_reports(client: Client, trained: Any, tmp_path: Path):
    comparison = compare(trained.good, trained.bad)
    query = "filter=wrong%20and%20step%20%3D%3D%201&sort=-error"
    answer = client.ask(f"/api/export.csv?{query}")
    plain = comparison.to_csv(tmp_path, filter="wrong and step == 1", sort="-error")[0]
    assert answer.body == plain.read_bytes()
    assert answer.body.count(b"\n") > 1
    assert 'filename="pairs.csv"' in answer.headers["content-disposition"]
    workbook = tmp_path / "found.xlsx"
    workbook.write_bytes(client.ask(f"/api/export.xlsx?{query}").body)
    sheet = openpyxl.load_workbook(workbook)["pairs"]
    assert sheet.max_row == answer.body.count(b"\n")


def test_a_conclusion_is_the_worst_row_of_each_wrong_site(client: Client, trained: Any):
    comparison = compare(trained.good, trained.bad)
    pairs, wrong = comparison.pairs, comparison.select("wrong and step == 2").rows
    error = pairs.numbers("error")
    worst: dict[str, int] = {}
    for row in wrong.tolist():  # all of them diverged
        site = pairs["site"][row]
        worst[site] = row if error[row] > error[worst.get(site, row)] else worst.get(site, row)

    def exported(query: str) -> list[tuple[str, float]]:
        answer = client.ask(f"/api/export.csv?filter=step%20%3D%3D%202&conclusion=1{query}").body.decode()
        return [(row["site"], float(row["error"])) for row in csv.DictReader(answer.splitlines())]

    found = [(site, float(f"{error[row]:.6g}")) for site, row in worst.items()]
    assert exported("") == found
    assert [size for _, size in exported("&sort=-error")] == sorted((size for _, size in found), reverse=True)


def test_choosing_runs_in_the_page(choosing: Client):
    session = choosing.ask("/api/session").document
    assert (session["kind"], session["job"]["state"]) == ("choose", "idle")
    assert [(run["label"], run["open"]) for run in session["runs"]] == [
        ("bad", False),
        ("broken", False),
        ("good", False),
    ]
    assert choosing.ask("/api/overview").status == 409
    assert choosing.ask("/api/run/2").document["steps"] == [0, 1, 2]
    asked = {"reference": "2", "candidate": "0", "options": {"steps": "1:3"}, "noise": "2"}
    assert choosing.post("/api/compare", asked).status == 202
    session = choosing.until_done()
    assert (session["kind"], session["options"], session["job"]["state"]) == ("comparison", {"steps": "1:3"}, "done")
    assert (session["noise"], session["fixed"]) == ("2", {})
    assert choosing.ask("/api/overview").document["first"]["step"] == 1
    assert choosing.post("/api/compare", {"reference": "1", "candidate": None}).status == 202
    session = choosing.until_done()
    assert (session["kind"], session["generation"]) == ("run", 2)
    assert choosing.ask("/api/overview").document["counts"]["alarms"] > 0
    assert choosing.ask("/api/export.csv").status == 422


def test_what_was_asked_wrongly_is_said(client: Client):
    for body, status, why in (
        ({"reference": "0", "candidate": "9"}, 422, "There is no run '9'"),
        ({"reference": "0", "candidate": "1", "options": {"steps": 7}}, 422, "steps is a text"),
        ({"reference": "0", "candidate": "1", "options": {"map": "/etc/passwd"}}, 422, "There is no option 'map'"),
        ({"reference": "0", "candidate": "1", "noise": "../x"}, 422, "There is no run"),
        ({"reference": 0}, 400, "the number of a run as a text"),
        ([], 400, "an object"),
    ):
        answer = client.post("/api/compare", body)
        assert (answer.status, why in answer.document["error"]) == (status, True), answer
    assert client.ask("/api/compare", "POST", b"{", JSON).status == 400
    assert client.ask("/api/compare", "POST", b"[" * 30_000, JSON).status == 400
    for query in ("filter=nonsense%20%28", "sort=nothing"):
        answer = client.ask(f"/api/export.csv?{query}")
        assert (answer.status, bool(answer.document["error"])) == (422, True)
    assert client.ask("/api/pair/999999").status == 404
    assert client.ask("/api/compare").status == 405


def test_a_comparison_that_cannot_be_made_says_why(choosing: Client):
    choosing.post("/api/compare", {"reference": "2", "candidate": "0", "options": {"steps": "100:"}})
    session = choosing.until_done()
    assert (session["kind"], session["job"]["state"]) == ("choose", "failed")
    assert session["job"]["text"].endswith(".")


def test_a_long_comparison_tells_how_far_it_is_and_can_be_stopped(choosing: Client, monkeypatch: pytest.MonkeyPatch):
    far, go_on = threading.Event(), threading.Event()

    def slowly(*runs: Any, progress: Any, **rest: Any) -> comparing.ComparisonData:
        def told(done: int, total: int) -> None:
            progress(done, total)
            if done == 5:
                far.set()
                assert go_on.wait(20)

        return comparing.compare(*runs, progress=told, **rest)

    monkeypatch.setattr(workspace_module, "compare", slowly)
    choosing.post("/api/compare", {"reference": "2", "candidate": "0"})
    assert far.wait(20)
    job = choosing.ask("/api/session").document["job"]
    assert (job["state"], job["done"], job["text"]) == ("running", 5, "comparing values")
    assert job["total"] > 5
    busy = choosing.post("/api/compare", {"reference": "2", "candidate": "1"})
    assert (busy.status, busy.document["error"]) == (409, "A comparison is under way. Stop it first.")
    assert choosing.post("/api/stop", {}).status == 202
    go_on.set()
    session = choosing.until_done()
    assert (session["kind"], session["job"]["state"], session["job"]["done"]) == ("choose", "stopped", 5)
    monkeypatch.undo()
    choosing.post("/api/compare", {"reference": "2", "candidate": "0"})
    assert choosing.until_done()["kind"] == "comparison"


# What a client without access gets.

PATHS = (
    "/api/session",
    "/api/overview",
    "/api/columns",
    "/api/pair/0",
    "/api/run/0",
    "/api/export.csv",
    "/static/page.js",
)


@pytest.mark.parametrize("cookie", [None, "wrong", "", "right-but-not-quite"])
def test_nothing_without_the_token(client: Client, cookie: str | None):
    for path in PATHS:
        assert client.ask(path, cookie=cookie).status == 403, path
    assert client.post("/api/compare", {"reference": "0", "candidate": "1"}, cookie=cookie).status == 403
    assert client.ask("/", cookie=cookie).status == 403
    assert client.ask("/?token=wrong", cookie=cookie).status == 403
    assert client.ask("/?token=%F0%9F%98%80", cookie=cookie).status == 403


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil", "", "[::1", "10.0.0.1", "a b"],
)
def test_nothing_under_another_name(client: Client, host: str):
    for path in (*PATHS, "/", f"/?token={client.access_token.token}"):
        assert client.ask(path, headers={"Host": host}).status in (400, 403), path


def test_names_of_this_machine_are_known(client: Client):
    for host in ("localhost", "127.0.0.1:9000", "[::1]:80", "LOCALHOST:1"):
        assert client.ask("/api/session", headers={"Host": host}).status == 200
    assert "192.168.0.7" in names_of("192.168.0.7")
    assert names_of("0.0.0.0") > names_of("127.0.0.1")


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/static/../server.py",
        "/static/..%2f..%2fserver.py",
        "/static/%2e%2e/%2e%2e/etc/passwd",
        "/static/page.js/../../../etc/passwd",
        "/static/",
        "/static/page.js%00.txt",
        "//etc/passwd",
        "/api/run/..%2F..%2Fetc",
        "/api/run/%2Fetc%2Fpasswd",
        "/api/run/0%00",
        "/api/pair/-1",
        "/api/pair/0.5",
        "/api/pair/" + "9" * 900,
        "/api/export.html",
        "/api/export.csv/../../x",
        "/api/source?file=/etc/passwd",
        "/api",
        "/docs",
    ],
)
def test_nothing_but_what_there_is(client: Client, path: str):
    answer = client.ask(path)
    assert answer.status == 404
    assert b"root:" not in answer.body
    assert len(answer.body) < 2000


def test_requests_have_a_size(client: Client):
    large = b" " * (MOST_BODY + 1)
    assert client.ask("/api/compare", "POST", large, JSON).status == 413
    assert client.ask("/api/overview", "GET", large).status == 413
    assert client.ask(f"/api/export.csv?filter={'x' * 10_000}").status == 414
    assert client.ask(f"/api/run/{'0' * 2000}").status == 414
    chunks = b"".join(b"4000\r\n" + b" " * 0x4000 + b"\r\n" for _ in range(5)) + b"0\r\n\r\n"
    cookie = f"{client.access_token.name}={client.access_token.token}"
    head = f"POST /api/compare HTTP/1.1\r\nHost: localhost\r\nCookie: {cookie}\r\n"
    head += "Content-Type: application/json\r\nX-Astray: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", client.port), 20) as raw:
        raw.sendall(head.encode() + chunks)
        assert b" 413 " in raw.recv(4096).splitlines()[0]


def test_another_sites_page_cannot_post(client: Client):
    asked = {"reference": "0", "candidate": "1"}
    own = f"http://127.0.0.1:{client.port}"
    generation = client.ask("/api/session").document["generation"]
    assert client.post("/api/compare", asked, headers={"Origin": "http://evil.example"}).status == 403
    assert client.post("/api/compare", asked, headers={"Origin": "null"}).status == 403
    assert client.post("/api/compare", asked, headers={"Origin": f"http://127.0.0.1:{client.port + 1}"}).status == 403
    body = json.dumps(asked).encode()
    assert client.ask("/api/compare", "POST", body, {"Content-Type": "text/plain", "X-Astray": "1"}).status == 415
    assert client.ask("/api/compare", "POST", body, {"Content-Type": "application/json"}).status == 403
    assert client.ask("/api/stop", "POST", b"{}", {"Content-Type": "application/x-www-form-urlencoded"}).status == 415
    assert client.until_done()["generation"] == generation
    assert client.post("/api/stop", {}, headers={"Origin": own}).status == 202


def test_other_methods_are_refused(client: Client):
    for method in ("PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"):
        assert client.ask("/api/session", method).status == 405
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "x", "Sec-WebSocket-Version": "13"}
    assert client.ask("/api/nothing", headers=upgrade).status == 404


def test_hostile_names_are_only_ever_json(tmp_path: Path):
    array = np.array([1.0, np.nan, np.inf], np.float32)
    with RunWriter(tmp_path / "run", info=RunInfo.of_process()) as writer:
        for number, name in enumerate(HOSTILE):
            writer.call(Call(number, 0, 0, "module", name, name, 0, "forward"))
            memory = Strided.from_numpy(array)
            writer.tensor(Tensor(number, "output", name, "float32", (3,), (1,), "cpu", False, *measure(memory)), array)
    hostile = Client(Workspace(RunList([tmp_path / "run"])))
    try:
        hostile.workspace.open("0", None, {}).wait(20)
        for row, name in enumerate(HOSTILE):
            answer = hostile.ask(f"/api/pair/{row}")
            assert answer.headers["content-type"] == "application/json"
            assert answer.document["key"]["site"] == name
            assert answer.document["worst"][0]["a"] == "nan"
    finally:
        hostile.close()


def test_an_address_that_cannot_be_had(client: Client):
    with pytest.raises(UsageError, match="cannot be listened on"):
        listen("127.0.0.1", client.port)
    with pytest.raises(UsageError, match="cannot be listened on"):
        listen("no.such.host.invalid", 0)
    with pytest.raises(UsageError, match="cannot be listened on"):
        listen("127.0.0.1", 99999)


def test_what_to_type_into_a_browser():
    with listen("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        assert address(bound, "127.0.0.1") == f"http://127.0.0.1:{port}/"
        assert address(bound, "0.0.0.0") == f"http://127.0.0.1:{port}/"
        assert address(bound, "::1") == f"http://[::1]:{port}/"


def test_the_runs_are_not_touched(client: Client, trained: Any):
    assert open_run(trained.good).complete


# -- connections -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET /api/session HTTP/1.1\r\nHost: x\r\nX-Slow: ",
        b"POST /api/stop HTTP/1.1\r\nContent-Length: 9\r\n\r\n{",
    ],
    ids=["nothing", "half a head", "half a body"],
)
def test_idle_connections_keep_nobody_out(client: Client, said: bytes) -> None:
    idle = []
    for number in range(400):
        one = socket.create_connection(("127.0.0.1", client.port), timeout=60)
        one.sendall(said)
        idle.append(one)
        if number % 100 == 99:
            assert client.ask("/api/session").status == 200
    assert client.ask("/").status == 200
    for one in idle:
        one.close()


def test_connections_that_read_nothing_keep_nobody_out(client: Client) -> None:
    head = f"GET /api/columns HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\n"
    head += f"Cookie: {client.access_token.name}={client.access_token.token}\r\n\r\n"
    slow = []
    for _ in range(300):
        one = socket.create_connection(("127.0.0.1", client.port), timeout=60)
        slow.append(one)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # it may have had to make room by then
            one.sendall(head.encode() * 50)
    assert client.ask("/api/session").status == 200
    for one in slow:
        one.close()


def test_a_connection_that_asks_nothing_is_closed(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safety, "REQUEST_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", client.port), timeout=60) as one:
        one.sendall(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert one.recv(1) == b""


def test_few_files_leave_room_for_what_the_server_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (100, 100))
    assert safety.most_open() == 50
