"""An earlier `bench serve` that goes on: its file, and what has to be the same for its seeds to count.

The number of a point's seeds says which they are (`serving_points.point_of`), so nothing else is kept of who ran them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hybridstate.bench.recorded_form import ABSENT, Recorded, check
from hybridstate.bench.serving_arms import Profile
from hybridstate.bench.serving_form import Result
from hybridstate.bench.serving_points import NOT_BEGUN, Key, differing, other_commits
from hybridstate.bench.sweep import Options
from hybridstate.bench.traces import Trace
from hybridstate.checkpoint.documents import read_object, result_of
from hybridstate.errors import UsageError, reading
from hybridstate.provenance import environment

_FOLLOWS: Final[dict[str, set[str]]] = {
    "working_set": {"clients", "admission"},
    "prefill chunk": {"trace"},
    "control_trace": {"scale"},
}
"""What differs with another entry, and is not told beside it."""


class _Provenance(Recorded):
    commit: str | None = ABSENT


@dataclass(frozen=True)
class Earlier:
    """An earlier `bench serve` that goes on.

    Attributes:
        document: its result, `tp`, `device` and `gate input` beside the other entries.
        goals: goodput goals of its seeds, in milliseconds.
        chunks: prompt tokens of one prefill call, of its points.
        padded: running limit -> batch sizes that its points padded so many requests to.
        commits: that its seeds ran at, other than this one, each once.
    """

    document: dict[str, Any]
    goals: list[dict[str, float]]
    chunks: list[int]
    padded: dict[int, list[int]]
    commits: list[str]

    def check_options(self, model: str, profile: Profile, options: Options) -> None:
        """Compare what is known before the model is loaded.

        Raises:
            UsageError: it was another sweep.
        """
        wanted = {
            "model": model,
            "clients": options.clients,
            "think_s": options.think,
            "policy": options.policy,
            "budget_scope": options.scope,
            "working_set": options.working_set,
            "admission": options.admission_json,
            "tp": options.tp,
            "gate input": _gate_input(profile.note),
            "goodput goal": options.goal_json,
        }
        theirs = {**self.document, "goodput goal": _other(self.goals, options.goal_json)}
        for limit in options.limits:
            name = f"batch size for limit {limit}"
            wanted[name] = padded_to(limit, max(options.limits))
            theirs[name] = _other(self.padded.get(limit, ()), wanted[name])
        earlier(theirs, wanted)

    def points(
        self, header: Mapping[str, Any], trace: Trace, control: Trace | None, chunk: int
    ) -> dict[Key, dict[str, Any]]:
        """The points, compared with what is known of the loaded model.

        Args:
            header: of the document that goes on.
            trace, control: what is served; no control where it is not asked for.
            chunk: prompt tokens of one prefill call.

        Raises:
            UsageError: it was another sweep, or ran on another kind of device.
        """
        document, profile = self.document, header["profile"]
        wanted = {name: header[name] for name in ("plan_digest", "scale", "dtype")}
        wanted |= {
            "trace": trace.to_json(),
            "device": header["device"]["name"],
            "prefill chunk": chunk,
            "synthetic weights": profile["synthetic"],
        }
        if control is not None and document.get("control_trace") is not None:
            wanted["control_trace"] = control.to_json()
        if document["budget_scope"] == "state+kv":
            wanted["kv_bytes_per_token"] = profile["kv_bytes_per_token"]
        theirs = {**document["profile"], **document, "prefill chunk": _other(self.chunks, chunk)}
        theirs["synthetic weights"] = document["profile"].get("synthetic")
        return earlier(theirs, wanted)


def padded_to(limit: int, running: int) -> int:
    """Batch size of `limit` requests in an engine for `running`, whose sizes are powers of two and `running`."""
    return min(1 << (limit - 1).bit_length(), running)


def read_earlier(path: Path) -> Earlier:
    """An earlier `bench serve`, whole or partial, before anything is compared.

    Raises:
        SourceError: the file cannot be read, or is no result of `bench serve`.
    """
    hint = "give a document of `bench serve`, whole or partial, as it was written"
    with reading(path, f"cannot read the points of {path.name}", hint=hint):
        whole = read_object(path)
        command = whole.get("command", "bench serve")
        document = dict(result_of(whole))
        if command != "bench serve":
            raise TypeError(f"it is a result of `{command}`")
        if document.get("simulated"):
            raise TypeError("it is simulated")
        check(Result, document)
        points = list(earlier(document, {}).values())
        seeds = [seed for point in points for seed in point.get("seeds", ())]
        engines = [(p["limit"], p["engine"]) for p in points if p.get("engine")]
        padded: dict[int, list[int]] = {}
        for limit, engine in engines:
            sizes = [size for size in engine.get("sizes", ()) if size >= limit]
            padded.setdefault(limit, []).extend(sizes[:1])
        provenance = whole.get("provenance") or document.get("provenance") or {}
        check(_Provenance, provenance, "provenance")
        ran = [*document.get("continued", ()), provenance.get("commit") or "unknown"]
        document["tp"] = document["profile"].get("tp", 1)
        document["gate input"] = _gate_input(document["profile"]["note"])
        document["device"] = document["device"]["name"]
        return Earlier(
            document,
            [seed["goodput_slos_ms"] for seed in seeds if "goodput_slos_ms" in seed],
            [engine["chunk"] for _, engine in engines if "chunk" in engine],
            padded,
            other_commits(ran, environment()["commit"]),
        )


def _gate_input(note: str) -> str:
    """The number in a profile's note, wherever it came from; else the note."""
    found = re.search(r"gate input (\S+)", note)
    return note if found is None else found[1]


def _other(values: Sequence[Any], ours: Any) -> Any:
    """The first of some values that is not ours; ours where there is none."""
    return next((value for value in values if value != ours), ours)


def earlier(document: Mapping[str, Any], header: Mapping[str, Any]) -> dict[Key, dict[str, Any]]:
    """Points of a document of the same sweep, for `known`, without those that its deadline came before.

    Args:
        document: the earlier result.
        header: of the sweep that goes on; every entry has to be the same there.

    Raises:
        UsageError: it was another sweep; names each entry that differs, with both values.
    """
    other = {name for name, value in header.items() if document.get(name) != value}
    told = [
        f"{name} ({differing(document.get(name), value)})"
        for name, value in header.items()
        if name in other and not other & _FOLLOWS.get(name, set())
    ]
    if told:
        raise UsageError(
            f"the earlier run had another {', '.join(told)}",
            hint="resume with the same options, model and trace",
        )
    return {
        (p["arm"], p["ratio"], p["limit"], control): {k: p[k] for k in p if k != "left_out"}
        for control, points in ((False, "points"), (True, "control"))
        for p in document[points]
        if p.get("seeds") or not str(p.get("skipped", "")).endswith(NOT_BEGUN)
    }
