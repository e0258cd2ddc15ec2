"""Generated block `cache-stress` of docs/serving.md, from benchmarks/cache-stress.json (scripts/cache_stress.py)."""

from collections.abc import Callable, Mapping
from typing import Any

import tables
from recordings import recorded, source_line

Result = Mapping[str, Any]


def stress(result: Result) -> str:
    """Operations, reclamations, refused states and leaks of each arm; starts and compared replies on the models."""
    rows = []
    for entry in result["without_tensors"]:
        done = entry["operations"]
        tried = sum(done.values())
        counted = [done["submit"], done["finish"], done["abort"], entry["counters"]["demotions"]]
        rows.append(
            [
                "no tensors",
                entry["arm"],
                f"{tried:,}",
                *(f"{n:,}" for n in (*counted, entry["reclamations"])),
                *_refused(entry["counters"], entry),
                "",
                "",
                str(entry["leaked_slots"]),
            ]
        )
    for entry in result["models"]:
        counters = entry["counters"]
        finished = counters["requests"] - counters["aborts"]
        rows.append(
            [
                entry["model"],
                entry["arm"],
                f"{entry['operations']:,}",
                f"{counters['requests']:,}",
                f"{finished:,}",
                f"{counters['aborts']:,}",
                f"{counters['demotions']:,}",
                "",
                *_refused(counters, entry.get("met", {})),
                " / ".join(f"{entry['starts'][k]:,}" for k in ("dense", "compressed", "miss")),
                f"{entry['replies_compared']:,}, {entry['replies_that_differ']} differ",
                str(entry["leaked_slots"]),
            ]
        )
    head = (
        "on",
        "arm",
        "operations",
        "submitted",
        "finished",
        "aborted",
        "demotions",
        "reclamations",
        "refused: full / not finite",
        "hits while demoting",
    )
    more = ("dense / compressed / missed starts", "replies compared", "leaked slots")
    return tables.markdown((*head, *more), rows)


def _refused(counters: Result, met: Result) -> tuple[str, str]:
    """States that were not kept, and hits on states being demoted; empty where those were not counted."""
    hits = met.get("while_moving")
    refused = f"{counters['skipped_full']:,} / {counters['skipped_nonfinite']:,}"
    return refused, "" if hits is None else f"{hits:,}"


def crowded(result: Result) -> str:
    """What the arms of several requests at once met; empty where no run has one."""
    found = [entry for entry in result["models"] if "met" in entry]
    if not found:
        return ""
    said: dict[str, list[str]] = {}
    for entry in found:
        met, counters = entry["met"], entry["counters"]
        known = f" ({met['broken_known']:,} known already)" if met["broken_known"] else ""
        text = (
            f"{met['broken']:,} broken states were offered and {counters['skipped_nonfinite']:,} refused{known}, "
            f"{met['stopped']:,} requests were ended because their own was; {counters['skipped_full']:,} states were "
            f"refused for lack of room; {met['while_moving']:,} hits on a state being demoted, for "
            f"{met['overtaken']:,} of which the transfer ended before the load"
        )
        said.setdefault(text, []).append(f"`{entry['model']}`")
    parts = [
        f"on {' and on '.join(names)}{' each' if len(names) > 1 else ''} {text}"
        for text, names in said.items()
    ]
    return (
        "`tight` on a model runs several requests at once, a step of one at a time, on pools without room for them. "
        "Transfers end late, in random steps, and numbers of a running request's state are made NaN or infinite before "
        f"it is offered to the cache: {'; '.join(parts)}."
    )


def stress_block() -> str:
    parts = []
    for path, document in recorded("cache-stress.json"):
        result = document["result"]
        parts += [stress(result), crowded(result), source_line(path, document)]
    return "\n\n".join(filter(None, parts))


BLOCKS: dict[str, Callable[[], str]] = {"cache-stress": stress_block}
