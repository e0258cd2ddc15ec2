"""A Hub on 127.0.0.1 for tests: pinned commits, ranges, logins, and every way to misbehave.

It counts requests and body bytes. `storage` is a second server at another port (another origin), to
which files redirect when asked to, as the Hub redirects to its object store.
"""

import json
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

FIRST_COMMIT = "1" * 40
SECOND_COMMIT = "2" * 40


_GARBAGE = {
    "Content-Range": ("", "bytes", "bytes 0-7/*", "bytes */8", "bytes 7-0/8", "bytes 0-7/" + "9" * 400,
                      "items 0-7/8", "\xff"),
    "Content-Length": ("0", "7", "100000", "99999999999999999999999", "-1", "x"),
    "Content-Encoding": ("gzip", "br", "identity", "\xe9"),
    "Location": ("", "/", "//", "http://", "ftp://127.0.0.1/x", "http://127.0.0.1:1/", "http://[::1",
                 "\x00", "http://a b/", "?", "file:///etc/passwd"),
    "Retry-After": ("0", "-1", "soon", "1e3", "999999", "0.01"),
    "RateLimit": ("", '"api";r=0;t=', '"api";r=0;t=0', "\xff"),
    "X-Error-Code": ("GatedRepo", "EntryNotFound", "\x1b[31m", "?" * 5000),
    "X-Error-Message": ("Access to this resource is disabled.", "\x1b[2J",
                        "invalid credentials in authorization header"),
    "X-Repo-Commit": ("1" * 40, "", "..", "\x1b[31m"),
    "ETag": ("", "\xff"),
    "Transfer-Encoding": ("chunked", "x"),
    "Set-Cookie": ("a=b; Domain=..", ";;;"),
}  # fmt: skip


@dataclass
class Repo:
    """One repository: commit -> folder, and what its branches and tags point to.

    Attributes:
        gated: files need the token `allowed`.
        private: nothing is shown without the token `allowed`.
        redirect: files are answered with a redirect to the storage server.
        moves_to: commit that `main` points to after the first file list was given.
    """

    commits: dict[str, Path]
    branches: dict[str, str] = field(default_factory=lambda: {"main": FIRST_COMMIT})
    gated: bool = False
    private: bool = False
    redirect: bool = False
    moves_to: str | None = None


@dataclass
class Fault:
    """Misbehaviour for `times` requests whose path contains `at`, after the first `after` of them."""

    kind: str
    at: str = ""
    times: int = 1_000_000
    seconds: float = 0.0
    after: int = 0


@dataclass(frozen=True)
class Seen:
    """One request as the server saw it."""

    server: str
    path: str
    range: str | None
    authorization: str | None
    status: int
    nbytes: int


class StandIn:
    """Both servers, their repositories, faults and log."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.faults: list[Fault] = []
        self.log: list[Seen] = []
        self.lock = threading.Lock()
        self.chaos: random.Random | None = None
        self.hub = _server(self, "hub")
        self.storage = _server(self, "storage")
        self.signature = 1

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.hub.server_port}"

    def reset(self) -> None:
        """Forget repositories, faults and log."""
        self.chaos = None
        self.repos.clear()
        self.faults.clear()
        self.log.clear()

    @property
    def body_bytes(self) -> int:
        return sum(seen.nbytes for seen in self.log)

    def take_fault(self, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times <= 0 or fault.at not in path:
                    continue
                if fault.after > 0:
                    fault.after -= 1
                    continue
                fault.times -= 1
                return fault
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are what many tests are about."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def _server(stand_in: StandIn, name: str) -> ThreadingHTTPServer:
    handler = type("Handler", (_Handler,), {"stand_in": stand_in, "name": name})
    return _Server(("127.0.0.1", 0), handler)


@contextmanager
def running() -> Iterator[StandIn]:
    """A stand-in that serves until the block ends."""
    stand_in = StandIn()
    threads = [
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        for server in (stand_in.hub, stand_in.storage)
    ]
    for thread in threads:
        thread.start()
    try:
        yield stand_in
    finally:
        for server in (stand_in.hub, stand_in.storage):
            server.shutdown()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stand_in: StandIn
    name: str

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if self.stand_in.chaos is not None and self.stand_in.chaos.random() < 0.3:
            self._chaos(self.stand_in.chaos)
            return
        fault = self.stand_in.take_fault(self.path)
        if fault is not None and self._misbehave(fault, path):
            return
        if self.name == "storage":
            self._stored(path)
        elif path.startswith("/api/models/"):
            self._listing(path.removeprefix("/api/models/"))
        else:
            self._file(path)

    # --- answers ------------------------------------------------------------------------------------

    def _listing(self, rest: str) -> None:
        name, _, revision = rest.partition("/revision/")
        repo = self.stand_in.repos.get(name)
        if repo is None or (repo.private and not self._allowed()):
            self._refuse(404 if self._token() else 401, "RepoNotFound")
            return
        revision = revision or "main"
        commit = revision if revision in repo.commits else repo.branches.get(revision)
        if commit is None:
            self._refuse(404, "RevisionNotFound")
            return
        folder = repo.commits[commit]
        files = [{"rfilename": file.name} for file in sorted(folder.iterdir())]
        answer = {"_id": "0", "id": name, "sha": commit, "siblings": files}
        self._answer(200, json.dumps(answer).encode())
        if repo.moves_to is not None:
            repo.branches["main"] = repo.moves_to

    def _file(self, path: str) -> None:
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        repo = self.stand_in.repos.get(match[1]) if match else None
        if match is None or repo is None:
            self._refuse(404 if self._token() else 401, "RepoNotFound")
            return
        if repo.gated and not self._allowed():
            self._refuse(403 if self._token() else 401, "GatedRepo")
            return
        commit = repo.branches.get(match[2], match[2])
        if commit not in repo.commits:
            self._refuse(404, "RevisionNotFound")
            return
        file = repo.commits[commit] / match[3]
        if not file.is_file():
            self._refuse(404, "EntryNotFound")
        elif repo.redirect and file.suffix == ".safetensors":
            storage = f"http://127.0.0.1:{self.stand_in.storage.server_port}"
            place = f"{storage}/{self.stand_in.signature}/{match[1]}/{commit}/{match[3]}?signature=s3cret"
            self._answer(302, b"", {"Location": place, "X-Repo-Commit": commit})
        else:
            self._send_file(file, {"X-Repo-Commit": commit, "ETag": '"abc"'})

    def _stored(self, path: str) -> None:
        signature, owner, name, commit, file = path.lstrip("/").split("/", 4)
        if int(signature) != self.stand_in.signature:
            self._answer(403, b"signature expired")
            return
        self._send_file(self.stand_in.repos[f"{owner}/{name}"].commits[commit] / file, {})

    def _send_file(self, file: Path, headers: dict[str, str]) -> None:
        size = file.stat().st_size
        span = _parse_range(self.headers.get("Range"), size)
        if span is None:
            self._answer(200, file.read_bytes(), headers)
        elif span[0] >= size:
            self._answer(416, b"", {"Content-Range": f"bytes */{size}"})
        else:
            start, end = span
            with file.open("rb") as stream:
                stream.seek(start)
                body = stream.read(end - start)
            self._answer(206, body, headers | {"Content-Range": f"bytes {start}-{end - 1}/{size}"})

    def _refuse(self, status: int, code: str) -> None:
        message = "Invalid username or password." if status == 401 else code
        self._answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": message})

    def _answer(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        write: Callable[[bytes], None] | None = None,
    ) -> None:
        self.stand_in.log.append(
            Seen(
                self.name,
                self.path,
                self.headers.get("Range"),
                self.headers.get("Authorization"),
                status,
                len(body),
            )
        )
        try:
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
                self.send_header(name, value)
            self.end_headers()
            (write or self.wfile.write)(body)
        except OSError:
            self.close_connection = True  # the client has seen enough

    def _token(self) -> str | None:
        value = self.headers.get("Authorization")
        return None if value is None else value.removeprefix("Bearer ")

    def _allowed(self) -> bool:
        return self._token() == "allowed"

    # --- misbehaviour -------------------------------------------------------------------------------

    def _misbehave(self, fault: Fault, path: str) -> bool:
        """Answer wrongly; False where the right answer follows after all."""
        kind = fault.kind
        if kind.isdigit():
            wait = {"Retry-After": str(fault.seconds)} if fault.seconds else {}
            if fault.seconds < 0:  # the Hub's own way
                wait = {"RateLimit": f'"resolvers";r=0;t={-fault.seconds:.0f}'}
            self._answer(int(kind), b"no", wait)
            return True
        if kind == "late":
            time.sleep(fault.seconds)
            return False
        if kind == "bad-token":
            said = {"X-Error-Message": "Invalid credentials in Authorization header"}
            self._answer(401, b"", said)
            return True
        if kind == "loop":
            self._answer(302, b"", {"Location": self.path})
            return True
        if kind == "not-the-hub":
            self._answer(200, b"<html>Please log in to the hotel network</html>")
            return True
        if kind == "renamed":
            self._answer(307, b"", {"Location": self.path.replace("/old/", "/org/")})
            return True
        return self._misbehave_in_the_body(fault, path)

    def _chaos(self, rng: random.Random) -> None:
        """A status, headers and a body that belong to nothing."""
        status = rng.choice(
            (
                200,
                200,
                206,
                206,
                206,
                204,
                301,
                302,
                304,
                307,
                400,
                401,
                403,
                404,
                416,
                418,
                500,
                503,
                599,
            )
        )
        body = rng.randbytes(rng.choice((0, 1, 8, 100, 5000)))
        headers = {
            name: rng.choice(values) for name, values in _GARBAGE.items() if rng.random() < 0.4
        }
        if rng.random() < 0.5 and "Range" in self.headers:
            start, end = self.headers["Range"].removeprefix("bytes=").split("-")
            size = int(end) - int(start) + 1
            body = rng.randbytes(size) if size < 1_000_000 else body
            headers["Content-Range"] = (
                f"bytes {start}-{end}/{rng.choice((int(end) + 1, 27863, 10**12))}"
            )
        self.close_connection = True
        self._answer(status, body, headers)

    def _misbehave_in_the_body(self, fault: Fault, path: str) -> bool:
        kind = fault.kind
        folder = next(iter(next(iter(self.stand_in.repos.values())).commits.values()))
        data = (folder / path.rpartition("/")[2]).read_bytes()
        start, end = _parse_range(self.headers.get("Range"), len(data)) or (0, len(data))
        body, size = data[start:end], len(data)
        of = {"Content-Range": f"bytes {start}-{end - 1}/{size}"}
        if kind == "ignore-range":
            self._answer(200, data)
        elif kind == "cut":

            def half(body: bytes) -> None:
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                self.close_connection = True

            self._answer(206 if "Range" in self.headers else 200, body, of, half)
        elif kind == "drip":

            def drip(body: bytes) -> None:
                for byte in body:
                    self.wfile.write(bytes([byte]))
                    self.wfile.flush()
                    time.sleep(fault.seconds)

            self._answer(206, body, of, drip)
        elif kind == "no-content-range":
            self._answer(206, body)
        elif kind == "other-range":
            self._answer(206, body, {"Content-Range": f"bytes {start + 1}-{end}/{size}"})
        elif kind == "longer":
            self._answer(206, body + b"x", of)
        elif kind == "other-size":
            self._answer(206, body, {"Content-Range": f"bytes {start}-{end - 1}/{size + 8}"})
        elif kind == "encoded":
            self._answer(206, body, of | {"Content-Encoding": "gzip"})
        elif kind == "other-commit":
            self._answer(206, body, of | {"X-Repo-Commit": SECOND_COMMIT})
        else:
            raise AssertionError(kind)
        return True


def _parse_range(value: str | None, size: int) -> tuple[int, int] | None:
    match = re.fullmatch(r"bytes=(\d+)-(\d+)", value or "")
    return (int(match[1]), min(int(match[2]) + 1, size)) if match else None
