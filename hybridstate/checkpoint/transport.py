"""Requests to the Hugging Face Hub: checked byte ranges, time limits, retries, and what they cost.

A body is read only after status 206 and a Content-Range that equals the request have been seen, so
a server that ignores ranges costs a few hundred bytes and never a shard. `huggingface_hub` gives the
HTTP client, the address of a file and the login; it is imported with the first request.
"""

import importlib
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlsplit

from hybridstate import __version__
from hybridstate.checkpoint.answers import (
    checked_range,
    endpoint,
    gave_up,
    refusal,
    too_long,
    unexpected,
)
from hybridstate.errors import SourceError

ATTEMPTS: Final = 5
"""Tries of one request before it fails."""

FIRST_WAIT_SECONDS: Final = 0.5
LONGEST_WAIT_SECONDS: Final = 60.0
SLOWEST_BYTES_PER_SECOND: Final = 4_096
"""A body that falls behind this rate for longer than the read time limit is given up."""

_SIGNATURE_RAN_OUT: Final = ("forbidden", "missing", "status")
"""What a storage host answers to an address that is no longer valid; the Hub gives a new one."""

_RETRIED: Final = frozenset({408, 429, 500, 502, 503, 504})

T = TypeVar("T")


class _Again(Exception):
    """An attempt that failed in a way that the next one may not."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.reason, self.wait = reason, wait


@dataclass
class Transport:
    """Requests for one repository.

    Attributes:
        repo: `org/name`.
        revision: what was asked for, for messages.
        commit: sha that every answer of the repository must belong to, once it is known.
        requests: requests made so far, redirects and repetitions included.
        received: bytes of bodies received so far.
        sleep, clock: injected in tests.
    """

    repo: str
    revision: str | None = None
    commit: str | None = None
    requests: int = 0
    received: int = 0
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    _direct: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def listing(self, *, limit: int) -> bytes:
        """Commit and file names of the revision, as JSON of the Hub.

        Raises:
            SourceError: see `refusal`; `reason` in its context tells the cases apart.
        """
        at = "" if self.revision is None else f"/revision/{quote(self.revision, safe='')}"
        url = f"{endpoint()}/api/models/{self.repo}{at}?expand=sha&expand=siblings"
        return self._full(url, limit, f"the file list of {self.repo}")

    def small(self, file: str, *, limit: int) -> bytes:
        """A whole file of at most `limit` bytes.

        Raises:
            SourceError: see `refusal`; or it is larger.
        """
        return self._full(self._address(file), limit, file)

    def range(self, file: str, start: int, end: int, total: int | None = None) -> tuple[bytes, int]:
        """Bytes [start, end) of a file, and its size.

        Args:
            total: size that an earlier answer gave.

        Raises:
            SourceError: see `refusal`; or the server ignores ranges, sends other bytes than asked
                for, or gives another size than before.
        """
        wanted = f"bytes={start}-{end - 1}"

        def take(response: Any) -> tuple[bytes, int]:
            size = checked_range(response, file, start, end)
            if total is not None and size != total:
                raise SourceError(
                    f"{self.repo}: {file} has {size} bytes now and had {total} before",
                    hint="the server mixes versions; try again later",
                    reason="changed",
                    file=file,
                )
            return self._body(response, end - start, end - start, file), size

        address = self._address(file)
        direct = self._direct.get(address)
        if direct is not None:
            try:
                return self._send(direct, {"Range": wanted}, take, file)
            except SourceError as error:
                if error.context.get("reason") not in _SIGNATURE_RAN_OUT:
                    raise
                self._direct.pop(address, None)
        return self._send(address, {"Range": wanted}, take, file, source=address)

    def _address(self, file: str) -> str:
        from huggingface_hub import hf_hub_url

        return str(hf_hub_url(self.repo, file, revision=self.commit, endpoint=endpoint()))

    def _full(self, url: str, limit: int, what: str) -> bytes:
        def take(response: Any) -> bytes:
            if response.status_code != 200:
                raise unexpected(response, what)
            length = response.headers.get("Content-Length", "")
            expected = int(length) if length.isdigit() and len(length) < 19 else None
            if expected is not None and expected > limit:
                raise too_long(what, expected, limit)
            return self._body(response, expected, limit, what)

        return self._send(url, {}, take, what)

    def _body(self, response: Any, expected: int | None, limit: int, what: str) -> bytes:
        """The body, of exactly `expected` bytes where that is known, never more than `limit`."""
        started, pieces, length = self.clock(), [], 0
        for piece in response.iter_raw():
            pieces.append(piece)
            length += len(piece)
            self._count(received=len(piece))
            if length > limit:
                raise too_long(what, length, limit)
            seconds = self.clock() - started
            if seconds > _seconds() + length / SLOWEST_BYTES_PER_SECOND:
                raise _Again(f"only {length} bytes in {seconds:.0f} s")
        if expected is not None and length != expected:
            raise _Again(f"the connection was cut after {length} of {expected} bytes")
        return b"".join(pieces)

    def _send(
        self,
        url: str,
        headers: dict[str, str],
        take: Callable[[Any], T],
        what: str,
        source: str | None = None,
    ) -> T:
        """One request with its repetitions; `take` turns the answer into the result.

        Args:
            source: the address whose redirect is remembered for the next range.
        """
        for attempt in range(ATTEMPTS):
            try:
                return self._once(url, headers, take, what, source)
            except _Again as failure:
                if attempt == ATTEMPTS - 1:
                    reason = f"{failure.reason}, {ATTEMPTS} times"
                    raise gave_up(self.repo, url, what, reason) from failure
                wait = FIRST_WAIT_SECONDS * 2**attempt if failure.wait is None else failure.wait
                if wait > LONGEST_WAIT_SECONDS:
                    reason = f"{failure.reason} and asks to wait {wait:.0f} s"
                    raise gave_up(self.repo, url, what, reason) from failure
                self.sleep(wait)
        raise AssertionError("unreachable")

    def _once(
        self,
        url: str,
        headers: dict[str, str],
        take: Callable[[Any], T],
        what: str,
        source: str | None,
    ) -> T:
        from huggingface_hub import get_session
        from huggingface_hub.errors import OfflineModeIsEnabled

        session = get_session()
        library = importlib.import_module(type(session).__module__.partition(".")[0])
        sent = _login(with_token=_origin(url) == _origin(endpoint()))
        try:
            with session.stream(
                "GET",
                url,
                headers={**sent, "Accept-Encoding": "identity", **headers},
                timeout=_seconds(),
                follow_redirects=True,
            ) as response:
                self._count(1 + len(response.history))
                status = response.status_code
                if status in _RETRIED:
                    raise _Again(f"status {status}", _retry_after(response))
                if status >= 400:
                    raise self._refusal(response, what, logged_in="authorization" in sent)
                self._check_commit(response)
                if source is not None and response.history:
                    self._direct[source] = str(response.url)
                return take(response)
        except OfflineModeIsEnabled as error:
            raise SourceError(
                f"{what} of {self.repo} is not in the cache, and requests are switched off",
                hint="unset HF_HUB_OFFLINE, or give a local folder",
                reason="offline",
            ) from error
        except library.TransportError as error:
            name = type(error).__name__
            if name in ("UnsupportedProtocol", "ProxyError"):
                raise gave_up(self.repo, url, what, name) from error
            raise _Again(f"{name}{f': {error}' if name == 'ConnectError' else ''}") from error
        except (library.TooManyRedirects, library.InvalidURL, library.DecodingError) as error:
            raise gave_up(self.repo, url, what, type(error).__name__) from error

    def _count(self, requests: int = 0, received: int = 0) -> None:
        with self._lock:
            self.requests += requests
            self.received += received

    def _refusal(self, response: Any, what: str, *, logged_in: bool) -> SourceError:
        return refusal(self.repo, self.revision, response, what, logged_in=logged_in)

    def _check_commit(self, response: Any) -> None:
        if self.commit is None:
            return
        for part in (*response.history, response):
            found = part.headers.get("X-Repo-Commit")
            if found is not None and found != self.commit:
                raise SourceError(
                    f"{self.repo}: asked for commit {self.commit[:12]}, the server answered with "
                    f"{found[:12]!r}",
                    hint="a cache between here and the Hub mixes versions; try again later",
                    reason="changed",
                )


def _retry_after(response: Any) -> float | None:
    """Seconds that the answer asks to wait: `Retry-After`, or what is left of the Hub's window."""
    value = response.headers.get("Retry-After", "")
    if re.fullmatch(r"\d{1,6}(\.\d{1,3})?", value):
        return float(value)
    window = re.search(r";r=0;t=(\d{1,6})$", response.headers.get("RateLimit", ""))
    return float(window[1]) if window and response.status_code == 429 else None


def _seconds() -> float:
    """Time limit of connecting and of each read (`HF_HUB_DOWNLOAD_TIMEOUT`)."""
    from huggingface_hub import constants

    return float(constants.HF_HUB_DOWNLOAD_TIMEOUT)


def _login(*, with_token: bool) -> dict[str, str]:
    """User agent, and the token of `HF_TOKEN` or `hf auth login` where there is one."""
    utils: Any = importlib.import_module("huggingface_hub.utils")
    headers: dict[str, str] = utils.build_hf_headers(
        library_name="hybridstate",
        library_version=__version__,
        token=None if with_token else False,
    )
    return headers


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc
