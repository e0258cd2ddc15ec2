"""What an answer of the Hub means: the range that was asked for, or an error with the next step."""

import re
from typing import Any, Final
from urllib.parse import urlsplit

from hybridstate.errors import SourceError

_CONTENT_RANGE: Final = re.compile(r"^bytes (\d{1,19})-(\d{1,19})/(\d{1,19})$")
_OF_TOTAL: Final = re.compile(r"^bytes \*/(\d{1,19})$")


def endpoint() -> str:
    """Address of the Hub, from `HF_ENDPOINT`."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT).rstrip("/")


def refusal(
    repo: str, revision: str | None, response: Any, what: str, *, logged_in: bool
) -> SourceError:
    """What a status of 400 or more means, with the next command."""
    status, code = response.status_code, response.headers.get("X-Error-Code", "")
    said = response.headers.get("X-Error-Message", "")
    page = f"{endpoint()}/{repo}"
    if code == "GatedRepo":
        login = f"accept them at {page}, then run: hf auth login"
        ask = f"the account in use has no access yet; ask for it at {page}"
        return SourceError(
            f"{repo} is gated: its owner gives access to accounts that accept the terms",
            hint=ask if logged_in else login,
            reason="gated",
            model=repo,
        )
    if code == "RevisionNotFound":
        return SourceError(
            f"{repo} has no revision {revision}",
            hint=f"see {page}/commits/main, or leave @revision out for the default branch",
            reason="missing-revision",
            model=repo,
        )
    if code == "EntryNotFound":
        return SourceError(
            f"{repo} has no {what}",
            hint=f"see {page}/tree/main for what it has",
            reason="missing-file",
            model=repo,
            file=what,
        )
    if status == 401 and "credentials" in said.lower():
        return SourceError(
            f"the Hub does not accept the login in use ({repo})",
            hint="run: hf auth login, or correct HF_TOKEN",
            reason="login",
            model=repo,
        )
    if "disabled" in said.lower():
        return SourceError(
            f"{repo} has been disabled by the Hub",
            hint=f"see {page}, or choose another model",
            reason="disabled",
            model=repo,
        )
    if code == "RepoNotFound" or status in (401, 404):
        seen = (
            "the account in use does not see it"
            if logged_in
            else "if it is private, run: hf auth login"
        )
        return SourceError(
            f"no model repository {repo} at {endpoint()}, or it is private",
            hint=f"check the spelling; {seen}",
            reason="missing",
            model=repo,
        )
    if status == 416:
        size = _OF_TOTAL.match(response.headers.get("Content-Range", ""))
        has = f"; it has {size[1]} bytes" if size else ""
        return SourceError(
            f"{repo}: {what} ends before the bytes that were asked for{has}",
            hint="the file in the repository is incomplete; try another revision",
            reason="short",
            file=what,
        )
    if status == 403:
        return SourceError(
            f"the Hub refuses {what} of {repo} to the login in use (status 403)",
            hint="a fine-grained token needs read access to this repository; run: hf auth login",
            reason="forbidden",
            model=repo,
        )
    return unexpected(response, f"{what} of {repo}")


def unexpected(response: Any, what: str) -> SourceError:
    host = urlsplit(str(response.url)).netloc
    return SourceError(
        f"{host} answered with status {response.status_code} when asked for {what}",
        hint="try again later",
        reason="status",
        found=response.status_code,
    )


def too_long(what: str, found: int, limit: int) -> SourceError:
    return SourceError(
        f"{what} has {found} bytes or more, at most {limit} are accepted",
        hint="this is not what a model has under that name; try another revision",
        reason="too-long",
        found=found,
        expected=limit,
    )


def checked_range(response: Any, file: str, start: int, end: int) -> int:
    """Size of the whole file, once the answer is known to be the range that was asked for."""
    host = urlsplit(str(response.url)).netloc
    status, headers = response.status_code, response.headers
    download = "download the model and give its folder: hf download ... --local-dir DIR"
    if status != 206:
        length = headers.get("Content-Length", "an unknown number of")
        raise SourceError(
            f"{host} ignores byte ranges: asked for {end - start} bytes of {file}, it answered with "
            f"status {status} and {length} bytes, which were not read",
            hint=f"a proxy may be in between; else {download}",
            reason="no-ranges",
            file=file,
        )
    found = _CONTENT_RANGE.match(headers.get("Content-Range", ""))
    if found is not None and int(found[3]) < end:
        raise SourceError(
            f"{file} ends after {found[3]} bytes, {end} are needed",
            hint="the file in the repository is incomplete; try another revision",
            reason="short",
            file=file,
            found=int(found[3]),
            expected=end,
        )
    if found is None or (int(found[1]), int(found[2]) + 1) != (start, end):
        raise SourceError(
            f"{host} sent other bytes of {file} than the {start}-{end - 1} that were asked for: "
            f"Content-Range {headers.get('Content-Range', 'is missing')!r:.80}",
            hint=f"a proxy may be in between; else {download}",
            reason="wrong-range",
            file=file,
        )
    encoding = headers.get("Content-Encoding", "identity")
    length = headers.get("Content-Length", str(end - start))
    if encoding != "identity" or length != str(end - start):
        raise SourceError(
            f"{host} contradicts itself about bytes {start}-{end - 1} of {file}: Content-Length "
            f"{length!r:.40}, encoding {encoding!r:.40}, size {found[3]}",
            hint=f"a proxy may be in between; else {download}",
            reason="wrong-range",
            file=file,
        )
    return int(found[3])


def gave_up(repo: str, url: str, what: str, reason: str) -> SourceError:
    host = urlsplit(url).netloc
    busy = reason.startswith("status ")
    wanted = what if what.endswith(f" of {repo}") else f"{what} of {repo}"
    message = (
        f"{host} answers with {reason}, when asked for {wanted}"
        if busy
        else f"cannot get {wanted} from {host}: {reason}"
    )
    return SourceError(
        message,
        hint="try again later; what was read before is cached and can be used with --offline"
        if busy
        else "check the network and HF_ENDPOINT; what was read before can be used with --offline",
        reason="rate-limited" if reason.startswith("status 429") else "unreachable",
        model=repo,
    )
