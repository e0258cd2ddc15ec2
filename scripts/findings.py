"""What recorded results say, in sentences whose numbers are read from the recordings.

Each function takes the results of one section by model and gives Markdown, "" where a recording lacks what it needs.
What is said holds for the two embedded models and their texts, no further.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from calibration_tables import LATE, by_format, late_slope, seeds_of, slope, unfinished
from tables import Result

Results = Mapping[str, Result]


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines if line)


def models(results: Results, text: Callable[[Result], str]) -> str:
    """`text(result)` for each model in the order of the results; one that has no answer is left out by name."""
    found = {name: said for name, result in results.items() if (said := text(result))}
    if len(found) == len(results):
        return " / ".join(dict.fromkeys(found.values()))
    return ", ".join(f"{said} (`{name}`)" for name, said in found.items())


def ratio(result: Result, first: str, second: str) -> float | None:
    """KL of one format over KL of another."""
    found = by_format(result)
    if first not in found or second not in found or not found[second]["kl"]:
        return None
    return float(found[first]["kl"] / found[second]["kl"])


def times(result: Result, first: str, second: str) -> str:
    value = ratio(result, first, second)
    return "" if value is None else f"{value:.2g}x" if value < 10 else f"{value:.0f}x"


def over_seeds(result: Result, first: str, second: str) -> str:
    """Ratio of the mean KLs, and its range over seeds, which share texts and prompts."""
    value, found = ratio(result, first, second), by_format(result)
    if value is None:
        return ""
    if len(result.get("validation_seeds", [0])) < 2:
        return f"{value:.2f}"
    pairs = zip(found[first]["samples"]["kl"], found[second]["samples"]["kl"], strict=True)
    each = [a / b for a, b in pairs]
    return f"{value:.2f} (seeds {min(each):.2f} to {max(each):.2f})"


def bits(result: Result, name: str) -> str:
    row = by_format(result).get(name)
    return "" if row is None else f"{row['bits_per_value_with_ring']:.4g}"


def exact_kl(result: Result, name: str) -> str:
    row = by_format(result).get(name)
    return "" if row is None else f"{row['kl']:.2g}"


def masks(_: Results) -> str:
    """What the intervals of DASC against random masks are over."""
    return (
        "DASC's units and each random mask are held fixed over all questions and prose; the intervals resample "
        "those, not the masks. No spread: every case gave the same difference."
    )


def needs(_: Results) -> str:
    """What the rows of the interventions are."""
    return (
        "Something of the cached prefix is taken away before the question. *zero-kv*: the keys and values of the "
        "full-attention layers are zeroed; *zero-linear*: the recurrent states of the linear layers, their "
        "convolution windows stay; *zero-linear-conv*: those windows too; *zero-both*: KV and recurrent states; "
        "*other-prompt*: the recurrent states of another prompt stand in. Chance: counts 12.5 %, registers and "
        "tracking 6.2 %, else 0 %."
    )


# --- calibrations -----------------------------------------------------------------------------------


def precision(results: Results) -> str:
    """The findings of the calibrations, the ones that contradict DAMP first."""
    results = {n: r for n, r in results.items() if "damp-error-only" in by_format(r)}
    if not results:
        return ""
    parts = [
        "Two trained models of five million parameters, on texts they write themselves at temperature 1. "
        + " ".join(
            f"`{name}`: {seeds_of(result)}. {unfinished(result)}".strip()
            for name, result in results.items()
        )
        + " What follows is true of them; nothing is claimed for large models. Pairs of numbers are "
        + " / ".join(f"`{name}`" for name in results)
        + ".",
        bullets(
            (
                _decay_weight(results),
                _reorder(results),
                _stochastic(results),
                _deferred(results),
                _feedback(results),
                _low_formats(results),
                _growth(results),
            )
        ),
    ]
    return "\n\n".join(parts)


def _decay_weight(results: Results) -> str:
    pairs = [("damp", "damp-error-only"), ("damp+reorder", "damp-error-only+reorder")]
    found = [ratio(result, *pair) for result in results.values() for pair in pairs]
    same = all(value is None or abs(value - 1) < 0.05 for value in found)
    claim = "adds nothing here" if same else "changes KL by more than 5 % here"
    text = (
        f"**The decay weight of Eq. 15 {claim}.** KL with channels chosen by the risk, over KL "
        "with those of the "
        f"largest local error: {models(results, lambda r: over_seeds(r, 'damp', 'damp-error-only'))}; with values "
        "reordered "
        f"{models(results, lambda r: over_seeds(r, 'damp+reorder', 'damp-error-only+reorder'))}. Choosing by "
        f"energy alone gives {models(results, lambda r: times(r, 'damp-energy', 'damp'))} of DAMP's KL. "
        "What hurts is "
        f"ignoring the error: random channels {models(results, lambda r: times(r, 'damp-random', 'damp'))}"
    )
    retention = models(results, lambda r: times(r, "damp-retention-only", "damp"))
    return text + (f", retention alone {retention}." if retention else ".")


def _reorder(results: Results) -> str:
    return (
        "**Scaling and reordering values is worth as much as FP16 channels.** `int8-step+reorder` keeps "
        "no channel in FP16: "
        f"{models(results, lambda r: bits(r, 'int8-step+reorder'))} bits and a KL of "
        f"{models(results, lambda r: times(r, 'int8-step+reorder', 'damp'))} that of `damp` at "
        f"{models(results, lambda r: bits(r, 'damp'))} bits. Both together: "
        f"{models(results, lambda r: times(r, 'damp+reorder', 'damp'))}."
    )


def _stochastic(results: Results) -> str:
    return (
        "**Stochastic rounding needs no calibration at all.** At 9 bits its KL is "
        f"{models(results, lambda r: times(r, 'int8-step-stochastic', 'damp'))} that of `damp`. Its "
        "first steps are the worse "
        "ones (its rounding error is larger), but it accumulates more slowly: slope "
        f"{models(results, lambda r: slope(r, 'int8-step-stochastic'))} against "
        f"{models(results, lambda r: slope(r, 'int8-step'))} for rounding to nearest, whose errors are "
        "alike from step to step."
    )


def _deferred(results: Results) -> str:
    compared = ("int8-step", "damp", "int8-every-16", "damp-every-16", "fp16")
    return (
        "**Writing less often beats every choice of channels.** `damp-every-16` has "
        f"{models(results, lambda r: times(r, 'damp', 'damp-every-16'))} less KL than `damp`, `int8-every-16` "
        f"{models(results, lambda r: times(r, 'damp', 'int8-every-16'))} less. The ring of inputs has to stay "
        f"resident: {models(results, lambda r: kernel_bits(r, 'damp', 16))} bits in all. KDA's is "
        "the larger because it holds a decay for each key channel. FP16 takes 16 bits and its KL is lower still, "
        f"{models(results, lambda r: exact_kl(r, 'fp16'))} against "
        f"{models(results, lambda r: exact_kl(r, 'damp-every-16'))}: deferred writes save traffic, and "
        "for KDA hardly "
        "any room. State errors of `int8-step`, `damp`, `int8-every-16`, "
        "`damp-every-16` and `fp16` after the last update: "
        f"{'; '.join(state_errors(results, name) for name in compared)} "
        "(in a synthetic KDA recurrence of 3,072 steps they had been .172, .143, .047, .039 and .0046)."
    )


def kernel_bits(result: Result, packed: str, every: int) -> str:
    """Bits per value of a packed format with the ring that the kernels keep; embedded models only."""
    from hybridstate import analyze
    from hybridstate.errors import HybridStateError
    from hybridstate.quant.ring import ring_bits

    row = by_format(result).get(packed)
    try:
        spec = analyze(result["model"]["name"]).spec
    except HybridStateError:
        return ""
    if row is None:
        return ""
    ring = ring_bits(spec.layers[0], every, per_channel=spec.unit == "channel")
    return f"{row['bits_per_value'] + ring:.4g}"


def state_errors(results: Results, name: str) -> str:
    """Relative error of the state after the last update by model."""

    def error(result: Result) -> str:
        row = by_format(result).get(name)
        return "" if row is None else f"{row['state_error']:.2g}"

    return models(results, error)


def _feedback(results: Results) -> str:
    return (
        "**Error feedback.** An FP16 residual stops the growth (slope "
        f"{models(results, lambda r: slope(r, 'int8-feedback-fp16'))}) but takes "
        f"{models(results, lambda r: bits(r, 'int8-feedback-fp16'))} bits, more than storing FP16. An "
        "INT4 residual takes "
        f"{models(results, lambda r: bits(r, 'int8-feedback-int4'))} bits for "
        f"{models(results, lambda r: times(r, 'int8-feedback-int4', 'damp-k64'))} of the KL of 64 FP16 channels at "
        f"{models(results, lambda r: bits(r, 'damp-k64'))} bits."
    )


def _low_formats(results: Results) -> str:
    return (
        "**FP8 is the wrong eight bits**: at the same size as INT8 its KL is "
        f"{models(results, lambda r: times(r, 'fp8', 'int8-step'))}, under `damp` "
        f"{models(results, lambda r: times(r, 'damp-fp8', 'damp'))}."
    )


def _growth(results: Results) -> str:
    """Why four bits diverge where the decay is close to 1."""
    said = []
    for name, result in results.items():
        row = by_format(result).get("nvfp4")
        if row is None:
            continue
        ends = [last for _, last in result["step_bins"]]
        errors = dict(zip(ends, row["steps"]["state_error"], strict=True))
        shown = ", ".join(f"{errors[e]:.2g} after {e:,}" for e in ends if e == 1 or e >= 512)
        said.append(
            f"`{name}` (median effective decay {result['effective_decay_median']:.3f}) {shown} updates"
        )
    if not said:
        return ""
    return (
        "**NVFP4 can diverge.** Its relative state error: "
        + "; ".join(said)
        + ". One write loses a tenth of what it stores, and the next update reads what was written. "
        "Where a head's decay is "
        "within about a thousandth of 1, rounding adds more than decay and delta rule remove, and the "
        "stored state itself "
        "grows; a synthetic recurrence does the same at a decay of 0.9999 and settles at 0.99 "
        "(`tests/quant/test_growth.py`). The norm after the state hides its size, so the KL stays finite while "
        f"answers go. {_saturated(results)}"
    )


def _saturated(results: Results) -> str:
    """What protected rows do to a state that diverges."""
    lines = []
    for name, result in results.items():
        row = by_format(result).get("damp-nvfp4")
        if row is not None and row["saturated"]:
            lines.append(
                f"Protected rows slow it (`damp-nvfp4` of `{name}`: {row['state_error']:.2g}), and "
                f"{row['saturated']:,} of "
                "their values ran into FP16's largest number."
            )
    return " ".join(lines)


def selectors(results: Results) -> str:
    """J of shared against per-head channels, and what it is worth in KL."""
    lines = []
    for name, result in results.items():
        gap = result.get("key_order_gap", {}).get("damp")
        change = ratio(result, "damp", "damp-per-head")
        if gap is None or change is None:
            continue
        over = result["over_seeds"]["key_order_gap"]["damp"]
        text = (
            f"`{name}`: channels per value head lower J by {100 * over['mean']:.1f} % of their own and change KL by "
            f"{100 * (1 / change - 1):+.1f} %"
        )
        row = by_format(result)["damp"]
        if row["kl_error"] is not None and abs(change - 1) < row["kl_error"] / row["kl"]:
            text += (
                ", less than its standard error: sharing channels costs nothing that can be seen"
            )
        lines.append(text + ".")
    return " ".join(lines)


def steps(results: Results) -> str:
    """Whether error accumulates or saturates."""
    found = {n: r for n, r in results.items() if slope(r, "int8-step")}
    if not found:
        return ""

    def last_doubling(result: Result) -> str:
        row = by_format(result).get("int8-step-stochastic")
        if row is None:
            return ""
        errors = row["steps"]["state_error"]
        return f"{100 * (errors[-1] / errors[-2] - 1):.0f} %"

    return (
        "Does error accumulate? With `int8-step` KL grows as step^b with b = "
        f"{models(found, lambda r: slope(r, 'int8-step'))}: close to linearly. With `damp` b = "
        f"{models(found, lambda r: slope(r, 'damp'))}, with `damp-every-16` b = "
        f"{models(found, lambda r: slope(r, 'damp-every-16'))}. {_late(found)}Rounding to nearest shows no end of it "
        "within 4,095 updates, "
        "so a KL from a short run says little about a long one. Stochastic rounding levels off (its "
        "state error grew by "
        f"{models(found, last_doubling)} over the last doubling of the steps); an FP16 residual hardly grows, b = "
        f"{models(found, lambda r: slope(r, 'int8-feedback-fp16'))}."
    )


def _late(results: Results) -> str:
    """Slopes without the first steps."""
    cells = [
        models(results, partial(late_slope, name=name))
        for name in ("int8-step", "damp", "damp-every-16")
    ]
    if not all(cells):
        return ""
    return f"From step {LATE} on alone they are {', '.join(cells[:-1])} and {cells[-1]}. "


def answers(results: Results) -> str:
    """Which formats lose answers, by two standard errors."""
    lines = []
    most, kept = 0.0, True
    for name, result in results.items():
        rows = (result.get("task_accuracy") or {}).get("rows", [])
        lost: dict[str, list[str]] = {}
        for row in rows:
            error = row["below_fp32_error"]
            most = max(most, -row["below_fp32"])
            if error is not None and row["below_fp32"] > max(2 * error, 0.005):
                cell = f"{row['format']} {100 * row['below_fp32']:.0f}"
                lost.setdefault(row["task"], []).append(cell)
                kept = kept and any(low in row["format"] for low in ("fp8", "int4", "nvfp4"))
        if rows:
            texts = [f"{task} ({', '.join(cells)} points)" for task, cells in lost.items()]
            lines.append(
                f"`{name}` loses answers by more than two standard errors in "
                f"{' and '.join(texts) or 'no format'}."
            )
    if not lines:
        return ""
    said = " ".join(lines)
    if kept:
        said += (
            " The INT8 formats keep their answers, `int8-step` included, although its KL is "
            f"{models(results, lambda r: times(r, 'int8-step', 'fp16'))} that of FP16: short answers about facts are "
            "an insensitive measure."
        )
    return (
        f"{said} Some formats answer up to {100 * most:.1f} points more than FP32, which is no reason to think them "
        "better: all formats share the same few texts. DAMP's published loss of INT8 is in long chains of reasoning, "
        "which these models cannot do."
    )


def concentration(results: Results) -> str:
    """Finding 1 and Spearman of risk, beside the paper's."""
    found = {n: r for n, r in results.items() if "reordered" in r.get("error_concentration", {})}
    if not found:
        return ""

    def share(name: str) -> str:
        def mean(result: Result) -> str:
            over = result.get("over_seeds", {}).get("error_concentration", {}).get(name)
            value = result["error_concentration"][name]["mean_over_heads"]
            return f"{100 * (over['mean_over_heads']['mean'] if over else value):.0f} %"

        return models(found, mean)

    return (
        "DAMP's 69 % (GDN) and 76 % (KDA) are what is left after scaling and reordering. Here the worst "
        "eighth of the key "
        f"channels holds {share('reordered')} after that step and {share('plain')} before it. The risk "
        "predicts the error "
        "that INT8 accumulates in a channel no better than the local error does."
    )


def greedy(results: Results) -> str:
    """What trajectories without sampling change, and by how much for which format."""
    seconds = {name: result["greedy"] for name, result in results.items() if result.get("greedy")}
    if not seconds:
        return ""

    def grown(format_name: str) -> str:
        """KL over that at temperature 1, per model; "" where a model lacks the format."""
        found = []
        for name, second in seconds.items():
            before, after = (by_format(part).get(format_name) for part in (results[name], second))
            if not before or not after or not before["kl"]:
                return ""
            value = after["kl"] / before["kl"]
            found.append(f"{value:.2g}" if value < 10 else f"{value:.0f}")
        return f"`{format_name}` {' / '.join(found)} times"

    parts = [
        f"`{name}`: {100 * second['repeated_32gram_share']:.0f} % of the 32-grams repeat, and KL of `damp` is "
        f"{times(second, 'damp', 'bf16')} that of BF16 and {times(second, 'damp', 'int8-step')} that of plain INT8"
        for name, second in seconds.items()
    ]
    rising = ", ".join(filter(None, map(grown, ("damp", "int8-step", "fp16"))))
    text = f"Greedy texts of these models run in circles. {'; '.join(parts)}. KL over that at temperature 1: {rising}"
    text += ", as if a small error were enough to tip a text out of its loop"
    carried = grown("int8-feedback-fp16")
    text += f"; {carried} (it carries its rounding error on)" if carried else ""
    return (
        f"{text}. That is a reading, not a test. Factors on other pages are those of temperature 1; "
        "`calibrate --temperature` takes texts like those that will be served."
    )
