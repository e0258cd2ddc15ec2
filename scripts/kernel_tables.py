"""Tables of docs/kernels.md from the kernels' files in benchmarks/: `TABLES` names them."""

import json
import re
from collections.abc import Callable, Collection, Mapping

from recordings import ROOT, recorded, source_line
from ring_tables import drift, ring, ring_bytes, ring_launches, ring_steps
from tables import Result, markdown, percent, times
from update_tables import fastest_fp32, over_pass, overlapped, peers, rivals, shares

FORM_BATCHES = (256, 64, 16, 8, 4, 1)
PASS_NAMES = {"packed": "packed bytes", "bf16": "16-bit bytes", "fp32": "FP32 bytes"}
README_LAYERS, README_BATCHES = ("qwen3-next", "kimi-linear"), (1, 4, 16, 64, 256)
"""Of the README's table of the fastest FP32 kernels, as of its table of updates."""
COMPILED = ROOT / "tests" / "data" / "kernels-sm90.json"
SHARED_BYTES, BLOCK_BYTES = 228 * 1024, 1024
"""Shared memory of a Hopper multiprocessor, and what each program takes besides its own."""


def _microseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


ORDERS = {
    "mma16816": "fragment order",
    "natural": "natural order",
    "rows": "rows",
    "columns": "columns",
}
VALUES = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16"}


def layout_words(layout_id: str) -> str:
    """A `layout_id` in words: order, head, what is kept in FP16."""
    order, *parts = layout_id.split("-")
    tile = order.removeprefix("tiles")
    words = f"tiles of {tile} columns" if tile.isdigit() else ORDERS[order]
    key, value = (
        next(p[1:] for p in parts if p[0] == letter and p[1:].isdigit()) for letter in "kv"
    )
    kept = [f"{p[4:]} FP16 channels" for p in parts if p.startswith("f16x")]
    kept += [VALUES[p] for p in parts if p in VALUES]
    return ", ".join((words, f"{key} x {value}", *kept))


def passes(result: Result) -> str:
    """The in-place pass over the bytes of each state format."""
    found = {(r["pass"], r["batch"]): r for r in result["rows"] if "pass" in r}
    rows = [
        [
            title,
            *(
                f"{found[name, b]['median_us']:.3g} ({found[name, b]['gb_per_s'] / 1e3:.2f})"
                if (name, b) in found
                else ""
                for b in FORM_BATCHES
            ),
        ]
        for name, title in PASS_NAMES.items()
    ]
    return markdown(["`x += 1` over", *(f"batch {b}: µs (TB/s)" for b in FORM_BATCHES)], rows)


def _variants(result: Result) -> dict[str, dict[int, Result]]:
    """Timed rows by variant and batch, in the order of the run."""
    found: dict[str, dict[int, Result]] = {}
    for row in result["rows"]:
        if "variant" in row and "median_us" in row:
            found.setdefault(row["variant"], {})[row["batch"]] = row
    return found


def forms(result: Result) -> str:
    """Microseconds of every form of the kernels by batch; the fastest packed one of each batch is bold."""
    variants = _variants(result)
    best = {
        (kind, b): min(
            (
                of[b]["median_us"]
                for name, of in variants.items()
                if b in of and name.startswith(kind) and _is_packed(name)
            ),
            default=None,
        )
        for kind in ("gdn", "kda")
        for b in FORM_BATCHES
    }
    rows: list[list[str]] = []
    commits: set[str] = set()
    for name, of in variants.items():
        first = next(iter(of.values()))
        commits |= {first["commit"][:12]} if "commit" in first else set()
        cells = []
        for b in FORM_BATCHES:
            us = of[b]["median_us"] if b in of else None
            top = us is not None and _is_packed(name) and us == best[name[:3], b]
            cells.append(f"**{_microseconds(us)}**" if top else _microseconds(us))
        mark = r"\*" if "commit" in first else ""
        rows.append([_label(name, first.get("layout")) + mark, *cells])
    text = markdown(["form", *(f"{b}" for b in FORM_BATCHES)], rows)
    return f"{text}\n\n{_earlier(commits)}" if commits else text


def _earlier(commits: Collection[str]) -> str:
    """What an asterisk means."""
    runs = " and ".join(sorted(commits))
    return (
        rf"\* Of an earlier run, with the kernels of commit {runs}: the run of the other rows ended before it came to "
        "these forms."
    )


def _label(name: str, layout_id: str | None) -> str:
    """The variant; where its name ends in the `layout_id`, in words."""
    form, _, last = name.rpartition(" ")
    return f"{form}, {layout_words(last)}" if last == layout_id else name


def _is_packed(name: str) -> bool:
    """Packed states of 128 x 128 and K_hi 16, by the variant's name."""
    return name.split(" ", 1)[1].startswith(("packed 128", "packed 64", "packed 32", "split")) and (
        "-k" not in name and "-v" not in name
    )


def dispatched(result: Result) -> str:
    """FP32 over what the packed dispatch picks by batch, launches of both one after another or both overlapped."""
    variants, rows = _variants(result), []
    for kind in ("gdn", "kda"):
        for launches, dense, overlap in (
            ("one after another", "", " overlap 0"),
            ("overlapped", " overlap 2", " overlap 2"),
        ):
            base = variants.get(f"{kind} fp32 tiles 8 fused{dense}", {})
            packed = variants.get(f"{kind} packed product fused{overlap}", {})
            ratios = [
                times(base[b]["median_us"] / packed[b]["median_us"])
                for b in FORM_BATCHES
                if b in base and b in packed
            ]
            if len(ratios) == len(FORM_BATCHES):
                rows.append([kind, launches, *ratios])
    heads = (f"{b}" for b in FORM_BATCHES)
    return markdown(["gate", "launches", *heads], rows) if rows else ""


def gains(result: Result) -> str:
    """What overlapping and fusing change within one run, and by how much its times repeat."""
    variants = _variants(result)
    fused, overlapping, given = "128 fused overlap 0", "128 fused overlap 2", "128 given gate"
    product = "product fused overlap 0"
    if any(f"{k} packed {x}" not in variants for k in ("gdn", "kda") for x in (given, product)):
        return ""

    def less(form: str, batch: int) -> str:
        pairs = [
            [variants[f"{k} packed {x}"][batch] for x in (fused, form)] for k in ("gdn", "kda")
        ]
        differences = [round(a["median_us"] - b["median_us"], 1) + 0.0 for a, b in pairs]
        return " / ".join(f"{x:.1f}" for x in differences) + " µs"

    return (
        "Within the run of the forms, `packed 128`, GDN / KDA: overlapping a launch with the end of the one before "
        f"takes off {less(overlapping, 256)} at batch 256 and {less(overlapping, 64)} at 64. Fusing the gate costs "
        f"{less(given, 256)} at batch 256. At that batch `packed product` is the same kernel, timed once more, and "
        f"took {less(product, 256)} less."
    )


def emitted(result: Result) -> str:
    """How many emitted modules passed."""
    passed = [found["ok"] for found in result["modules"].values()]
    return (
        f"{sum(passed)} of {len(passed)} [emitted modules](results.md#emitted-modules) passed every "
        f"comparison of their own `--check` on {result['device']}."
    )


def codecs(result: Result) -> str:
    """Transfers of whole states, each beside the in-place pass of the same run."""
    rows = [
        [
            row["model"],
            row["transfer"],
            f"{row['bytes'] / 1e6:,.0f}",
            f"{1e6 * row['launch_s']['median']:.1f}",
            f"{row['gb_per_s']:,.0f}",
            percent(row["share_of_pass"]),
        ]
        for part in result["codecs"]
        for row in part["rows"]
    ]
    head = ["layers of", "transfer", "MB", "µs", "GB/s", "of the in-place pass"]
    return markdown(head, rows)


def tokens(result: Result) -> str:
    """Several tokens in one launch beside as many single steps."""
    rows = [
        [
            *_case(t["name"]),
            f"{1e6 * t['one_launch_s']['median']:.1f}",
            f"{1e6 * t['single_steps_s']['median']:.1f}",
            times(t["single_steps_s"]["median"] / t["one_launch_s"]["median"]),
        ]
        for t in result["tokens"]
    ]
    return markdown(
        ["state", "gate", "batch", "tokens", "one launch, µs", "single steps, µs", "faster by"],
        rows,
    )


def _case(name: str) -> tuple[str, str, str, str]:
    """Of `LAYOUT_ID GATE batch N tokens N`."""
    layout_id, gate, _, batch, _, count = name.split(" ")
    return layout_words(layout_id), gate, batch, count


def programs_that_fit(registers: int, shared: int, warps: int = 1) -> int:
    """Programs of a kernel on one Hopper multiprocessor, by shared memory, registers and the limit of 32."""
    a_warp = 32 * 8 * -(-registers // 8)
    by_registers = 4 * (16384 // a_warp) // warps
    return min(32, by_registers, SHARED_BYTES // (shared + BLOCK_BYTES))


def compiled(record: Mapping[str, Result]) -> str:
    """Registers, shared bytes, instructions and programs on a multiprocessor, by compiled variant."""
    rows = []
    for name, found in record.items():
        split = re.search(r"split \d+ x (\d+)", name)
        fit = programs_that_fit(found["registers"], found["shared"], int(split[1]) if split else 1)
        numbers = [found[key] for key in ("registers", "local", "shared", "instructions")]
        rows.append([name, *(f"{x:,}" for x in (*numbers, fit))])
    head = ["registers", "spilled bytes", "shared bytes", "instructions", "on a multiprocessor"]
    return markdown(["kernel", *head], rows)


def counted(result: Result) -> str:
    """Bytes of memory that a launch moved, beside the model's."""
    rows = [
        [
            row["kernel"],
            str(row["batch"]),
            f"{row['counted_bytes'] / 1e6:.1f}",
            f"{row['model_bytes'] / 1e6:.1f}",
            f"{100 * (row['counted_bytes'] / row['model_bytes'] - 1):+.1f} %",
        ]
        for row in result["rows"]
    ]
    return markdown(["kernel", "batch", "counted MB", "model MB", "counted over model"], rows)


TABLES: dict[str, tuple[str, Callable[[Result], str]]] = {
    "kernel-passes": ("kernels.json", passes),
    "kernel-forms": ("kernels.json", forms),
    "kernel-dispatched": ("kernels.json", dispatched),
    "kernel-rivals": ("update.json", rivals),
    "kernel-peers": ("update.json", peers),
    "kernel-fastest": ("update.json", fastest_fp32),
    "kernel-over-pass": ("update.json", over_pass),
    "kernel-overlapped": ("overlapped.json", overlapped),
    "kernel-bytes": ("kernel-bytes.json", counted),
    "kernel-ring": ("ring.json", ring),
    "kernel-ring-launches": ("ring.json", ring_launches),
    "kernel-ring-bytes": ("ring.json", ring_bytes),
    "kernel-ring-steps": ("ring.json", ring_steps),
    "kernel-drift": ("ring.json", drift),
    "kernel-codecs": ("codecs.json", codecs),
    "kernel-tokens": ("codecs.json", tokens),
}
"""Block of docs/kernels.md: recorded file and table."""
SENTENCES: dict[str, tuple[str, Callable[[Result], str]]] = {
    "kernel-gains": ("kernels.json", gains),
    "kernel-emitted": ("emitted.json", emitted),
}
"""Likewise, for a sentence or two."""

BEFORE = {
    "kernel-overlapped": "Both formats with launches that read their states beside the end of the launch before:",
    "kernel-bytes": "Bytes of memory that one launch moved, counted by the profiler, beside the model's:",
}
"""Sentences in front of tables that a run may lack."""


def shares_block() -> str:
    """The table of shares with both its sources; "" where a file is missing."""
    files = [next(recorded(name), None) for name in ("update.json", "overlapped.json")]
    found = [entry for entry in files if entry is not None]
    if len(found) < 2:
        return ""
    lines = [source_line(path, document) for path, document in found]
    return "\n\n".join([shares(*(document["result"] for _, document in found)), *lines])


def compiled_block() -> str:
    """The compiled variants of the Triton release that the times come from, or of the newest recorded one."""
    records = json.loads(COMPILED.read_text())
    _, document = next(recorded("update.json"), (None, {}))
    ran = ".".join(document.get("provenance", {}).get("triton", "").split(".")[:2])
    version = ran if ran in records else max(records)
    source = f"Source: [{COMPILED.name}](../{COMPILED.relative_to(ROOT)}), Triton {version}, sm_90."
    return f"{compiled(records[version])}\n\n{source}"


def fastest_block() -> str:
    """The README's table of the fastest FP32 kernels."""
    _, document = next(recorded("update.json"), (None, {"result": {}}))
    return fastest_fp32(document["result"], README_LAYERS, README_BATCHES)


OLDER = "Not in the recorded run, which is older than this table."


def blocks() -> dict[str, Callable[[], str]]:
    """Functions that write the blocks; "" where the file does not exist, `OLDER` where it has no such rows."""

    def block(name: str, pattern: str, table: Callable[[Result], str]) -> Callable[[], str]:
        def write() -> str:
            parts = [(table(d["result"]), source_line(p, d)) for p, d in recorded(pattern)]
            found = "\n\n".join(f"{text}\n\n{line}" for text, line in parts if text)
            before = f"{BEFORE[name]}\n\n" if found and name in BEFORE else ""
            return before + found if found or not parts else OLDER

        return write

    return {
        **{name: block(name, *entry) for name, entry in (TABLES | SENTENCES).items()},
        "kernel-shares": shares_block,
        "kernel-compiled": compiled_block,
        "update-fastest": fastest_block,
    }
