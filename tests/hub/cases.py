"""Every way in which a Hub, a proxy or a network was made to fail: the table of docs/malformed.md."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tests.hub.standin import FIRST_COMMIT, Fault, StandIn

SHARD: Final = "model-00002-of-00003.safetensors"
FOREVER: Final = 1_000_000


@dataclass(frozen=True)
class HubCase:
    """One failure.

    Attributes:
        what: what goes wrong.
        spoil: sets the stand-in up; it holds `org/model`.
        reason: the `reason` in the error's context, None where the answer is right in the end.
        model: MODEL argument.
        job: more for the worker (`offline`, `weights`, `environment`).
    """

    what: str
    spoil: Callable[[StandIn], Any]
    reason: str | None
    model: str = "org/model"
    job: tuple[tuple[str, Any], ...] = ()


def fault(kind: str, at: str = SHARD, **more: Any) -> Callable[[StandIn], Any]:
    return lambda hub: hub.faults.append(Fault(kind, at=at, **more))


def repo(**changes: Any) -> Callable[[StandIn], Any]:
    return lambda hub: [setattr(hub.repos["org/model"], k, v) for k, v in changes.items()]


def nothing(hub: StandIn) -> None:
    pass


TOKEN: Final = (("environment", {"HF_TOKEN": "hf_another"}),)

HUB_CASES: Final = (
    HubCase("no such repository", nothing, "missing", "org/nothing"),
    HubCase("no such repository, logged in", nothing, "missing", "org/nothing", TOKEN),
    HubCase("private repository, not logged in", repo(private=True), "missing"),
    HubCase("gated repository, not logged in", repo(gated=True), "gated"),
    HubCase("gated repository, logged in without access", repo(gated=True), "gated", job=TOKEN),
    HubCase("a token that the Hub does not accept", fault("bad-token", ""), "login", job=TOKEN),
    HubCase("no such branch or tag", nothing, "missing-revision", "org/model@v9"),
    HubCase("no such commit", nothing, "missing-revision", f"org/model@{'9' * 40}"),
    HubCase("a file that was listed is gone", fault("404"), "missing"),
    HubCase("a repository that moved", fault("renamed", "/old/"), None, "old/model"),
    HubCase("a branch that moves meanwhile", repo(moves_to="2" * 40), None),
    HubCase("offline with an empty cache", nothing, "offline", job=(("offline", True),)),
    HubCase("weights are needed", nothing, "weights", job=(("weights", True),)),
    HubCase("Range ignored: status 200 and the whole shard", fault("ignore-range"), "no-ranges"),
    HubCase("no Content-Range", fault("no-content-range"), "wrong-range"),
    HubCase("another range than asked for", fault("other-range"), "wrong-range"),
    HubCase("a body one byte longer than the range", fault("longer"), "wrong-range"),
    HubCase("a compressed body", fault("encoded"), "wrong-range"),
    HubCase("status 416", fault("416"), "short"),
    HubCase("another file size in the second answer", fault("other-size", after=1), "changed"),
    HubCase("an answer of another commit", fault("other-commit"), "changed"),
    HubCase("a page of the hotel network", fault("not-the-hub", "/api/"), "no-listing"),
    HubCase("status 429 twice", fault("429", times=2, seconds=0.01), None),
    HubCase("status 429 for good", fault("429"), "rate-limited"),
    HubCase("status 429, wait an hour", fault("429", seconds=3600), "rate-limited"),
    HubCase("status 500 twice", fault("500", times=2), None),
    HubCase("status 500 for good", fault("500"), "unreachable"),
    HubCase("connection cut twice", fault("cut", times=2), None),
    HubCase("connection cut for good", fault("cut"), "unreachable"),
    HubCase("a redirect to itself", fault("loop"), "unreachable"),
    HubCase("redirects to another host", repo(redirect=True), None),
    HubCase("no answer in time", fault("late", seconds=1.2), "unreachable"),
    HubCase("one byte every 0.2 s", fault("drip", seconds=0.2), "unreachable"),
)  # fmt: skip


def prepare(hub: StandIn, case: HubCase) -> None:
    """Both commits of `org/model` exist; then spoil it."""
    commits = hub.repos["org/model"].commits
    commits["2" * 40] = commits[FIRST_COMMIT]
    case.spoil(hub)
