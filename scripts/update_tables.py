"""Tables of docs/kernels.md and of the README from `benchmarks/update.json` and `overlapped.json`."""

from collections.abc import Container

from tables import Result, markdown, percent, times

RIVAL_BATCHES = (1, 8, 64, 128, 256, 1024)
RIVAL_STATES = {
    "damp": "DAMP",
    "damp-scaled": "DAMP with a value scale",
    "damp, every 8, mixed": "DAMP, L = 8",
}
"""Of the table of rivals; the recorded file has all."""
SHARE_BATCHES = (128, 256, 512, 1024)
WANTED_SHARE = 0.8
"""Of the in-place pass's bytes a second, wanted at these batches."""


def rivals(result: Result) -> str:
    """Fastest other kernel of each width and place, over the packed step's time."""
    columns = ("fp32, in place", "fp32, out of place", "16-bit, in place", "16-bit, out of place")
    rows = [
        [
            entry["dims"],
            str(entry["batch"]),
            RIVAL_STATES[entry.get("state", "damp")],
            f"{1e6 * entry['damp_s']:.3g}",
            *(times(entry["fastest"].get(c, {}).get("over_damp")) for c in columns),
        ]
        for entry in result.get("fastest", [])
        if entry["fastest"]
        and entry["batch"] in RIVAL_BATCHES
        and entry.get("state", "damp") in RIVAL_STATES
    ]
    return markdown(["layer of", "batch", "state", "µs", *columns], rows) if rows else ""


def overlapped(result: Result) -> str:
    """FP32 and packed steps whose launches overlap the one before, both alike."""
    found = {
        (row["dims"]["name"], row["batch"], row["state"]): row["step_s"]["median"]
        for row in result["rows"]
    }
    rows = []
    for name, batch in dict.fromkeys((name, batch) for name, batch, _ in found):
        base, packed = found.get((name, batch, "fp32")), found.get((name, batch, "damp"))
        if base and packed:
            cells = (f"{1e6 * x:.3g}" for x in (base, packed))
            rows.append([name, str(batch), *cells, times(base / packed)])
    return markdown(["layer of", "batch", "FP32, µs", "DAMP, µs", "FP32 over DAMP"], rows)


def _packed_steps(result: Result) -> dict[tuple[str, int], Result]:
    """Rows of the packed format with everything folded, by layer and batch."""
    return {
        (r["dims"]["name"], r["batch"]): r
        for r in result["rows"]
        if r["state"] == "damp" and r["pass_s"]
    }


def _microseconds_of(row: Result) -> tuple[float, float]:
    """Of the step and of the in-place pass."""
    return 1e6 * row["step_s"]["median"], 1e6 * row["pass_s"]["median"]


def _beside_the_pass(row: Result) -> list[str]:
    step, plain_pass = _microseconds_of(row)
    by_bytes = row["gb_per_s"] / row["pass_gb_per_s"]
    text = percent(by_bytes)
    short = by_bytes < WANTED_SHARE
    return [
        f"{step:.1f}",
        f"{plain_pass:.1f}",
        f"**{text}**" if short else text,
        percent(plain_pass / step),
    ]


def shares(plain: Result, overlapping: Result) -> str:
    """What packed steps reach of the in-place pass, by bytes a second and by time; bold: less than wanted."""
    beside = _packed_steps(overlapping)
    rows = []
    for (name, batch), row in _packed_steps(plain).items():
        if batch not in SHARE_BATCHES:
            continue
        cells = [name, str(batch), f"{batch * row['dims']['value_heads']:,}"]
        for each in (row, beside.get((name, batch))):
            cells += [""] * 4 if each is None else _beside_the_pass(each)
        rows.append(cells)
    columns = ("µs", "pass, µs", "by bytes", "by time")
    heads = [f"{form}{x}" for form in ("", "overlapped: ") for x in columns]
    return markdown(["layer of", "batch", "heads", *heads], rows)


def over_pass(result: Result) -> str:
    """Microseconds of a packed step beyond all its bytes at the pass's speed, by layer and batch."""
    found = _packed_steps(result)
    batches = sorted({batch for _, batch in found})
    rows = []
    for name in dict.fromkeys(name for name, _ in found):
        cells = []
        for batch in batches:
            row = found.get((name, batch))
            lost = 0.0 if row is None else 1 - row["gb_per_s"] / row["pass_gb_per_s"]
            cells.append("" if row is None else f"{_microseconds_of(row)[0] * lost:.1f}")
        rows.append([name, *cells])
    return markdown(["layer of", *(f"{b}" for b in batches)], rows)


def fastest_fp32(
    result: Result,
    layers: Container[str] | None = None,
    batches: Container[int] | None = None,
) -> str:
    """The fastest FP32 kernel of the run over the packed step, by layer and batch; a peer's is named."""
    cells: dict[str, dict[int, str]] = {}
    for entry in result.get("fastest", []):
        name, batch = entry["dims"], entry["batch"]
        found = [x for column, x in entry["fastest"].items() if column.startswith("fp32")]
        wanted = (layers is None or name in layers) and (batches is None or batch in batches)
        if entry["state"] != "damp" or not found or not wanted:
            continue
        best = min(found, key=lambda x: x["seconds"])
        peer = "" if best["who"].startswith("ours") else f", {best['who'].split()[0]}"
        cells.setdefault(name, {})[batch] = times(best["over_damp"]) + peer
    columns = sorted({batch for line in cells.values() for batch in line})
    rows = [[name, *(line.get(b, "") for b in columns)] for name, line in cells.items()]
    return markdown(["layer of", *(f"batch {b}" for b in columns)], rows) if rows else ""


def peers(result: Result) -> str:
    """Kernels of other packages that the run timed."""
    grouped: dict[tuple[str, ...], dict[str, list[Result]]] = {}
    for row in result.get("peers", []):
        place = "in place" if row["in_place"] else "out of place"
        key = (row["peer"], row["kernel"], row["state"], place)
        grouped.setdefault(key, {}).setdefault(row["dims"], []).append(row)
    rows = [
        [
            *key,
            "; ".join(by_layer),
            str(sum("step_s" in row for found in by_layer.values() for row in found)),
            str(sum("failed" in row for found in by_layer.values() for row in found)),
        ]
        for key, by_layer in grouped.items()
    ]
    head = ["peer", "kernel", "state", "new state", "layers of", "rows timed", "failed"]
    return markdown(head, rows) if rows else ""
