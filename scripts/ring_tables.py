"""Tables of docs/kernels.md about deferred requantisation, from ring.json."""

import statistics
from typing import Any

from tables import Result, markdown, significant

PHASES = ("mixed", "aligned, two kernels", "aligned, one kernel", "aligned")
"""What the names of a ring's steps begin with, longest first; what follows is the launch, none of the plain one."""
LAUNCH_LENGTH = 8
"""Length of ring at which every launch is timed."""


Steps = dict[tuple[str, int, int, str], Result]
"""Rows by gate, batch, length and phases."""


def _by_launch(result: Result) -> dict[str, Steps]:
    """Steps with a ring by launch, the plain one ("") first."""
    found: dict[str, Steps] = {"": {}}
    for row in result["rows"]:
        if row["what"] != "step" or row["every"] == 1:
            continue
        name = row["name"].removesuffix(" phases")
        phases = next(x for x in PHASES if name == x or name.startswith(f"{x}, "))
        launch = name.removeprefix(phases).removeprefix(", ")
        key = row["kind"], row["batch"], row["every"], phases.removesuffix(", one kernel")
        found.setdefault(launch, {})[key] = row
    return found


def ring(result: Result) -> str:
    """Deferred requantisation: mean over L steps by batch, ring length and phases, of the plain launch."""
    found = _by_launch(result)[""]
    for r in result["rows"]:
        if r["what"] == "step" and r["every"] == 1 and "update.py" in r["name"]:
            found[r["kind"], r["batch"], 1, "mixed"] = r  # there are no phases
    rows = []
    for batch, every in sorted({key[1:3] for key in found}, key=lambda x: (-x[0], x[1])):
        line = [str(batch), "every step" if every == 1 else f"L = {every}"]
        for kind in ("gdn", "kda"):
            some = [found.get((kind, batch, every, x)) for x in ("mixed", "aligned", PHASES[1])]
            bits = next((f"{x['bits_per_value']:.2f}" for x in some if x is not None), "")
            line += [*("" if x is None else significant(_mean(x)) for x in some), bits]
        rows.append(line)
    heads = [
        f"{k} {x}" for k in ("GDN", "KDA") for x in ("mixed", "aligned", "two kernels", "bits")
    ]
    return markdown(["batch", "rewritten", *heads], rows)


def ring_launches(result: Result) -> str:
    """Mean over the steps of every launch, and by how much it differs from the plain one's."""
    rows = [r for r in result["rows"] if r["what"] == "step" and r["every"] == LAUNCH_LENGTH]
    launches = _by_launch({"rows": rows})
    batches = {key[1] for launch, of in launches.items() if launch for key in of}

    def cell(launch: str, *key: Any) -> str:
        row, plain = launches[launch].get(key), launches[""].get(key)
        if row is None:
            return ""
        more = f" ({_mean(row) - _mean(plain):+z.1f})" if launch and plain is not None else ""
        return f"{_mean(row):.1f}{more}"

    lines = []
    for batch in sorted(batches, reverse=True):
        for launch in launches:
            cells = [
                cell(launch, kind, batch, LAUNCH_LENGTH, phases)
                for kind in ("gdn", "kda")
                for phases in ("mixed", "aligned")
            ]
            if any(cells):
                lines.append([str(batch), launch or "plain", *cells])
    heads = [f"{k} {x}" for k in ("GDN", "KDA") for x in ("mixed", "aligned")]
    return markdown(["batch", "launch", *heads], lines) if lines else ""


def _mean(row: Result) -> float:
    """Microseconds, mean over the steps of a cycle, median of the cycles."""
    return float(statistics.median(row["us_mean"]))


def ring_bytes(result: Result) -> str:
    """Bytes of one step at the largest batch, by part."""
    steps = [r for r in result["rows"] if r["what"] == "step"]
    largest = max(r["batch"] for r in steps)
    rows, seen = [], set()
    for r in steps:
        key = (r["kind"], r["every"])
        if r["batch"] != largest or key in seen:
            continue
        seen.add(key)
        parts = [r["bytes"][name] / 1e6 for name in ("state", "ring", "io")]
        rows.append([r["kind"], str(r["every"]), *(f"{x:.1f}" for x in (*parts, sum(parts)))])
    head = ["gate", "L", "state MB", "ring MB", "inputs and output MB", "a step MB"]
    return markdown(head, rows)


def drift(result: Result) -> str:
    """Error of the state after many steps against float64, and how much less than every step's."""
    rows = []
    for r in result["rows"]:
        if r["what"] != "drift":
            continue
        base = r["state"]["1"]
        cells = [
            f"{x:.4f}" + ("" if every == "1" else f" ({base / x:.2f}x less)")
            for every, x in r["state"].items()
        ]
        rows.append([r["kind"], f"{r['steps']:,}", *cells])
    lengths = next(iter(r["state"] for r in result["rows"] if r["what"] == "drift"))
    return markdown(["gate", "steps", *(f"L = {x}" for x in lengths)], rows)


def ring_steps(result: Result) -> str:
    """Steps of aligned rings at the largest batch by what they do, and what mixed phases cost over their mean."""
    found = _by_launch(result)[""]
    largest = max(batch for _, batch, _, _ in found)
    rows = []
    for (kind, batch, every, phases), r in found.items():
        if batch != largest or phases == "mixed":
            continue
        first, *_, fullest, last = r["us_steps"]
        mixed = found.get((kind, batch, every, "mixed"))
        over = "" if mixed is None else f"{_mean(mixed) - _mean(r):+.1f}"
        kernels = "two" if phases == PHASES[1] else "one"
        cells = [f"{x:.1f}" for x in (first, fullest, last, _mean(r))]
        rows.append([kind, str(every), kernels, *cells, over])
    heads = ["empty ring", "fullest ring", "rewriting", "mean", "mixed over mean"]
    return markdown(["gate", "L", "kernels", *heads], rows)
