"""Tables that `hybridstate calibrate` prints."""

from typing import TYPE_CHECKING, Any

from hybridstate.cli.output import Output, counted, interval

if TYPE_CHECKING:
    from hybridstate.quality.calibration import Calibration


def calibration_tables(out: Output, found: "Calibration") -> None:
    """Every format's divergence, its growth and answers where measured, and how the channels were chosen."""
    document = found.document
    sequences, positions = document["validation_sequences"], document["validation_positions"]
    out.table(
        f"{document['model']['name']}: storage of the live state, requantised at every update",
        (
            "format",
            "bits",
            "KL",
            "+/-",
            "top-1 %",
            "state error",
            "perplexity",
            "risk J",
        ),
        [
            (
                row.format,
                _bits(row.bits_per_value, row.bits_per_value_with_ring),
                row.kl,
                row.kl_error,
                f"{100 * row.top1:.2f}",
                row.state_error,
                f"{row.perplexity_ratio:.4f}x",
                document["objective"].get(row.format),
            )
            for row in found.divergences
        ],
        note=f"{counted(sequences, 'sequence')} of {counted(positions, 'update')}, teacher-forced on the FP32 text; "
        "KL in nats with its standard error over sequences; state error relative, after the last update",
    )
    _growth(out, found)
    _answers(out, document)
    out.table("how the channels were chosen", ("quantity", "value"), _choice(document))
    for name, reason in document["skipped"].items():
        out.note(f"{name} was left out: {reason}")


def stage_line(measured: dict[str, Any]) -> str:
    """The time of each stage in one line, for a run that stopped."""
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in measured["stages_s"].items())


def stage_table(out: Output, measured: dict[str, Any]) -> None:
    """Where the time went, and what recording costs where that was measured."""
    wall = measured["wall_s"]
    rows: list[tuple[str, object]] = [
        (name, f"{seconds:.1f} s, {100 * seconds / wall:.0f} %")
        for name, seconds in measured["stages_s"].items()
    ]
    rows.append(("all", f"{wall:.1f} s"))
    for name, seconds in measured["overlapped_s"].items():
        rows.append((f"{name}, beside the others", f"{seconds:.1f} s"))
    plain, recorded = measured.get("plain_step_ms"), measured.get("recorded_step_ms")
    if recorded is not None:
        rows.append(("generation step", f"{recorded:.2f} ms"))
    if plain is not None:
        rows.append(("the same without recording", f"{plain:.2f} ms"))
    for name, size in measured["peak_memory"].items():
        rows.append(
            (name.removesuffix("_bytes").replace("_", " ") + " peak", f"{size / 1e9:.2f} GB")
        )
    if "recorded_bytes" in measured:
        rows.append(("trajectories on disk", f"{measured['recorded_bytes'] / 1e9:.2f} GB"))
    out.table("time of each stage", ("stage", "value"), rows)


def _bits(packed: float, with_ring: float) -> str:
    """Bits of a value, and what recent inputs add where writes are deferred."""
    ring = with_ring - packed
    return f"{packed:g}" if ring == 0 else f"{packed:g} + {ring:.3g} ring"


def _choice(document: dict[str, Any]) -> list[tuple[str, object]]:
    overlap, chance = document["split_agreement"], document["split_agreement_random"]
    rho = document["split_rank_correlation"]
    protocol = document["protocol"]
    return [
        ("FP16 key channels per head", document["k_hi"]),
        ("agreement of two halves of the prompts", f"{100 * overlap:.1f} %"),
        ("the same by chance", f"{100 * chance:.1f} %"),
        ("rank correlation of the halves", None if rho is None else f"{rho:.3f}"),
        *_findings(document),
        ("prompts", len(document["prompts"])),
        ("prompt + generated tokens", f"{protocol['input_tokens']} + {protocol['new_tokens']}"),
        ("horizon in updates", protocol["horizon"]),
        ("temperature", protocol["temperature"]),
        ("repeated 32-token stretches", f"{100 * document['repeated_32gram_share']:.1f} %"),
    ]


def _findings(document: dict[str, Any]) -> list[tuple[str, object]]:
    """What the run says about the method itself."""
    concentration, prediction = document["error_concentration"], document["risk_prediction"]
    rows: list[tuple[str, object]] = [
        (
            "INT8 error in the worst 12.5 % of channels",
            f"{100 * concentration['plain']['mean_over_heads']:.1f} %",
        )
    ]
    if "reordered" in concentration:
        share = concentration["reordered"]["mean_over_heads"]
        rows.append(("the same, values scaled and reordered", f"{100 * share:.1f} %"))
    for name, label in (("damp", "risk"), ("error-only", "local error")):
        rho = prediction.get(name, {}).get("spearman")
        if rho is not None:
            rows.append((f"rank correlation of {label} and accumulated error", f"{rho:.3f}"))
    for name, gap in document["key_order_gap"].items():
        rows.append((f"J of {name} above channels per value head", f"{100 * gap:.2f} %"))
    return rows


def _growth(out: Output, found: "Calibration") -> None:
    """KL in a few bins of steps and its growth, where there are enough steps for a slope."""
    rows = [row for row in found.divergences if row.steps.slope is not None]
    if not rows:
        return
    bins = found.document["step_bins"]
    shown = [place for place in range(len(bins)) if place % 3 == (len(bins) - 1) % 3]
    out.table(
        "KL by step, and the slope of log KL against log step",
        ("format", *(f"{bins[b][0]:,}-{bins[b][1]:,}" for b in shown), "slope", "95 % interval"),
        [
            (
                row.format,
                *(row.steps.kl[b] for b in shown),
                f"{row.steps.slope:.2f}",
                interval(row.steps.interval, "{:.2f}".format)
                or ("one sequence" if found.document["validation_sequences"] == 1 else ""),
            )
            for row in rows
        ],
        note=f"prompt prefilled in chunks of {found.document['prefill_chunk']:,} tokens, stored at each end",
    )


def _answers(out: Output, document: dict[str, Any]) -> None:
    """Exact answers after thousands of updates."""
    found = document["task_accuracy"]
    if found is None:
        return
    tasks = list(found["texts"])
    cells = {(row["format"], row["task"]): row for row in found["rows"]}
    names = dict.fromkeys(row["format"] for row in found["rows"])
    out.table(
        "synthetic questions after decoding through the stored state, % exact",
        ("format", *(text for task in tasks for text in (task, "+/-"))),
        [
            (
                name,
                *(
                    _percent(cells[name, task][key])
                    for task in tasks
                    for key in ("accuracy", "accuracy_error")
                ),
            )
            for name in names
        ],
        note=f"at least {found['filler_updates']:,} updates after the last fact; "
        + ", ".join(f"{found['questions'][t]:,} questions of {t}" for t in tasks),
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"
