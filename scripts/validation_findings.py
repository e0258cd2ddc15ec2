"""What recorded validations of horizons say, in sentences whose numbers are read from the recordings.

As in `findings`: results of one section by model in, Markdown out.
"""

from collections.abc import Mapping

from tables import Result

Results = Mapping[str, Result]


def validation(results: Results) -> str:
    """Ranks are not decisions, and which way the static horizon errs."""
    lines = []
    for name, result in results.items():
        found = result["validation"]
        low, high = (f(c["same_side"] for c in found["cutoffs"]) for f in (min, max))
        wrong = sum(c["omitted_but_longer"] for c in found["cutoffs"])
        omitted = sum(c["omitted"] for c in found["cutoffs"])
        lines.append(
            f"`{name}`: rank {found['horizons']['median']:.3f}, but only {100 * low:.0f} to "
            f"{100 * high:.0f} % of the units lie "
            f"on the same side of a cutoff; of {omitted:,} omissions {wrong:,} "
            f"({100 * wrong / omitted:.1f} %) were of "
            f"a unit that remembers longer than the cutoff{_harmful(found)}."
        )
    return (
        "Rank agreement is not agreement about a cutoff. "
        + " ".join(lines)
        + " Most disagreement is the harmless way round: the static horizon keeps units that forget sooner."
    )


def _harmful(found: Result) -> str:
    """Share of the disagreement at the largest cutoff in which a unit is omitted too early."""
    if not found.get("units"):
        return ""
    last = found["cutoffs"][-1]
    pairs = found["prefixes"] * len(found["units"]["static_horizon"])
    apart = round((1 - last["same_side"]) * pairs)
    if not apart:
        return ""
    return f" ({100 * last['omitted_but_longer'] / apart:.0f} % of the disagreement at {last['w_max']})"


def gate_input(results: Results) -> str:
    """What a measured a_s changes."""
    lines = []
    for name, result in results.items():
        choices = result["validation"].get("gate_input_choices")
        held_out = result["validation"].get("held_out")
        if not choices or not held_out:
            continue
        rank, given, other = choices["rank"], held_out[0], held_out[-1]
        low, high = (
            f"{100 * agreed['cutoffs'][0]['same_side']:.0f} %" for agreed in (given, other)
        )
        text = f"`{name}`: "
        if rank["flat"]:
            text += "no a_s changes an order (the objective is flat), so rank agreement cannot choose one; "
        else:
            text += f"rank agreement moves between {rank['worst']:.3f} and {rank['value']:.3f} over the whole grid; "
        text += (
            f"a_s = {other['gate_input']:g} from the median horizons changes the agreement at the "
            "smallest cutoff from "
            f"{low} to {high}"
        )
        text += ", and lies at the end of the grid." if choices["median"]["at_border"] else "."
        lines.append(text)
    return " ".join(lines)


def decay(results: Results) -> str:
    """Cross-domain order beside the published one."""
    cells = []
    for name, result in results.items():
        found = result["validation"].get("decay")
        if found:
            ranks = [
                d["with_reference"] for d in found["domains"] if d["with_reference"] is not None
            ]
            cells.append(f"{', '.join(f'{r:.3f}' for r in ranks)} (`{name}`)")
    if not cells:
        return ""
    return (
        f"The order of units across domains is less stable than published: {'; '.join(cells)}. The "
        "texts are read, not "
        "generated, and short; the GDN model has 48 units, so a few swaps show."
    )


def intervention(results: Results) -> str:
    """Opposite of Table 1a."""
    if not any(r["validation"].get("intervention") for r in results.values()):
        return ""
    return (
        "The opposite of the published models: there a needle is read from the KV cache and zeroed "
        "states change nothing; here "
        "it is read from the states alone, because the embedded models were trained so. Their restore "
        "and quality tables "
        "therefore test what a state loses far harder than a needle in a large model would, and say "
        "nothing about how much a "
        "large model would miss its states."
    )
