"""What the bench verbs print: their results as tables."""

from functools import partial
from typing import Any

from hybridstate.cli.output import Output, counted, interval

Rows = list[tuple[object, ...]]
MEASURES = {"kl": "prose KL", "bits_per_byte": "bits/byte"}


def restore_tables(out: Output, result: dict[str, Any]) -> None:
    """Arms, DASC against random masks, interventions, and the checks behind them."""
    protocol, check = result["protocol"], result["check"]
    tasks = protocol["tasks"]
    arms = [arm for arm in result["arms"] if arm["seed"] is None]
    out.table(
        f"{result['model']}: restoring {protocol['tokens']} tokens on {protocol['device']}, "
        f"{counted(protocol['questions'], 'synthetic question')} per task",
        (
            "arm",
            f"{protocol['unit']}s kept",
            "empty heads",
            "bytes",
            "ratio",
            "replayed",
            *(f"{task} %" for task in tasks),
            "prose KL",
            "+/-",
            "bits/byte",
            "TTFT ms",
        ),
        [_restore_row(arm, tasks) for arm in arms],
        note="nr-W: zeros for units below the cutoff W, wr-W: a replay for them; answers: higher is better; "
        "KL in nats per token against the dense restore, with its standard error: lower is better; ratio: dense "
        "bytes over these, BF16 convolution windows included; empty heads keep no unit; replayed tokens and TTFT "
        f"are those of a cached prefix of {protocol['ttft_tokens']['prefix']} tokens, median of "
        f"{arms[0]['ttft_s']['count']} "
        f"requests; units selected by {'the plan' if protocol['plan_digest'] else 'static horizon'}",
    )
    rows: Rows = [
        (
            entry["w_max"],
            MEASURES.get(entry["metric"], f"{entry['kind']} %"),
            _share(entry["dasc"], entry),
            _share(entry["random_mean"], entry),
            None if entry["random_sd"] is None else _share(entry["random_sd"], entry),
            _share(entry["difference"], entry),
            interval(entry["interval_95"], partial(_share, entry=entry)),
            f"{100 * max(o['jaccard'] for o in entry['overlap']):.0f}",
        )
        for entry in result["comparisons"]
    ]
    if rows:
        out.table(
            f"DASC (NR) against {len(protocol['mask_seeds'])} random masks with the same counts",
            (
                "W_max",
                "measure",
                "DASC",
                "random",
                "SD",
                "difference",
                "95 % interval",
                "overlap %",
            ),
            rows,
            note="DASC minus random: above 0 is better for answers (in points), below 0 for prose; paired over "
            "questions, bootstrap; SD over masks; overlap: largest Jaccard index of the kept units",
        )
    if result["interventions"]:
        out.table(
            "what the model loses without its state or its KV",
            ("taken away", *(f"{task} %" for task in tasks), "prose bits/byte"),
            [
                (
                    arm["arm"],
                    *(100 * arm["tasks"][task]["accuracy"] for task in tasks),
                    arm["prose"]["bits_per_byte"],
                )
                for arm in result["interventions"]
            ],
            note="zero-kv: keys and values of the full-attention layers zeroed before the question; zero-linear: the "
            "recurrent states, zero-linear-conv: their convolution windows too; zero-both: KV and recurrent states; "
            "other-prompt: the recurrent states of another prompt",
        )
    out.text(
        f"check: dense checkpoint bit-equal; {check['recompute_kl']:.2g} nats from full recomputation "
        f"(at most {check['recompute_kl_limit']:g}), {100 * check['same_answers']:.1f} % same answers"
    )


def _restore_row(arm: dict[str, Any], tasks: list[str]) -> tuple[object, ...]:
    kept = f"{arm['retained_units']:,}/{arm['units']:,}" if arm["units"] else None
    empty = f"{arm['heads_without_retained_units']}/{arm['heads']}" if arm["units"] else None
    return (
        arm["arm"],
        kept,
        empty,
        arm["checkpoint_bytes"] or None,
        None if arm["ratio_full"] is None else f"{arm['ratio_full']:.2f}x",
        arm["replayed_tokens"],
        *(100 * arm["tasks"][task]["accuracy"] for task in tasks),
        arm["prose"]["kl"],
        arm["prose"]["kl_se"],
        f"{arm['prose']['bits_per_byte']:.3f}",
        1e3 * arm["ttft_s"]["median"],
    )


def _share(value: float, entry: dict[str, Any]) -> str:
    digits = {"accuracy": f"{100 * value:.1f}", "kl": f"{value:.3g}"}
    return digits.get(entry["metric"], f"{value:.4f}")


def update_tables(out: Output, result: dict[str, Any]) -> None:
    """One line per layer, batch and format."""
    keys = ("dims", "batch", "gate", "state")
    faster = {tuple(s[k] for k in keys): s["fp32_over_this"] for s in result["speedups"]}
    out.table(
        f"one update of the recurrent state on {result['device']['name']}",
        (
            *("layer", "batch", "gate", "state", "ran", "bits", "µs", "p90"),
            *("GB/s", "pass GB/s", "FP32/this"),
        ),
        [
            (
                row["dims"]["name"],
                row["batch"],
                row["gate"],
                row["state"],
                row["backend"],
                row["bits_per_value"],
                1e6 * row["step_s"]["median"],
                1e6 * row["step_s"]["p90"],
                row["gb_per_s"],
                row["pass_gb_per_s"],
                times(faster.get((row["dims"]["name"], row["batch"], row["gate"], row["state"]))),
            )
            for row in result["rows"]
        ],
        note="FP32/this: above 1 is faster than FP32; pass GB/s: reading and writing as many bytes in place; "
        f"{result['protocol']['inputs']}; every step was first checked against float64"
        + reference_note(result["rows"]),
    )
    if result["rings"]:
        out.table(
            "the packed state rewritten once in L steps, mean over L",
            (
                "layer",
                "batch",
                "gate",
                "L",
                "phases",
                "ran",
                "bits",
                "µs",
                "p90",
                "MB",
                "FP32/this",
            ),
            [
                (
                    row["dims"]["name"],
                    row["batch"],
                    row["gate"],
                    row["every"],
                    row["phases"],
                    row["backend"],
                    row["resident_bits_per_value"],
                    1e6 * row["step_s"]["median"],
                    1e6 * row["step_s"]["p90"],
                    1e-6 * (row["state_bytes"] + row["ring_bytes"] + row["io_bytes"]),
                    times(
                        faster.get((row["dims"]["name"], row["batch"], row["gate"], row["state"]))
                    ),
                )
                for row in result["rings"]
            ],
            note="bits: resident, state and ring; phases mixed: slots rewrite at different steps",
        )
    columns = ("fp32, in place", "fp32, out of place", "16-bit, in place", "16-bit, out of place")
    if any(entry["fastest"] for entry in result["fastest"]):
        out.table(
            "the fastest of every other kernel, the package's or a peer's, over the packed step's time",
            ("layer", "batch", "gate", "state", "µs", *columns),
            [
                (
                    entry["dims"],
                    entry["batch"],
                    entry["gate"],
                    entry["state"],
                    1e6 * entry["damp_s"],
                    *(times(entry["fastest"].get(c, {}).get("over_damp")) for c in columns),
                )
                for entry in result["fastest"]
            ],
            note="out of place: the kernel returns a fresh state instead of writing into the pool"
            + "".join(f"; {p['peer']} {p['kernel']}: {p['failed']}" for p in _failed(result))
            + "".join(
                f"; {x['dims']}, batch {x['batch']}, {x['state']}: slower than FP32"
                for x in result["slower_than_fp32"]
            )
            + reference_note(result["rows"]),
        )


def _failed(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row of each peer kernel that could not be timed."""
    found = {(p["peer"], p["kernel"]): p for p in result["peers"] if "failed" in p}
    return list(found.values())


def reference_note(rows: list[dict[str, Any]]) -> str:
    if all(row["backend"] != "reference" for row in rows):
        return ""
    return "; the reference ran, so times say nothing about the kernels"


def times(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}x"
