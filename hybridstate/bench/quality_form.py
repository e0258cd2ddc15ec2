"""The form of a recorded `bench quality`: what a run that continues from it takes from its blocks."""

from collections.abc import Mapping
from typing import Any, Final

from hybridstate.bench.quality_options import BOUNDARIES
from hybridstate.bench.recorded_form import (
    SIGNED,
    an_object,
    count,
    entries,
    listed,
    named,
    number,
    one_of,
    optional,
    text,
)

_SHARE: Final = number(0, 1)
_INTERVAL: Final = optional(listed(SIGNED, 2))

_ARM: Final = entries(
    {
        "accuracy": _SHARE,
        "accuracy_se": optional(number()),
        "difference": SIGNED,
        "difference_interval_95": _INTERVAL,
        "same_reply": _SHARE,
        "kl_first": SIGNED,
        "bytes": count(),
        "hit": entries(
            {
                "token_hit": _SHARE,
                "hits": count(),
                "requests": count(1),
                "not_resident": listed(text),
            }
        ),
    },
    {"rounds_decoded": count(1), "rounds_differ": count(), "samples": listed(text)},
)

_RANDOM: Final = entries(
    {"w_max": count(1), "mean": _SHARE, "nr_above": SIGNED},
    {
        "sd_over_masks": optional(number()),
        "by_mask": listed(_SHARE),
        "nr_above_interval_95": _INTERVAL,
    },
)

_PLACE: Final = {"task": text, "tokens": count(1), "boundary": one_of(*BOUNDARIES)}

_BLOCK: Final = entries(
    {
        **_PLACE,
        "suite": text,
        "source": text,
        "questions": count(1),
        "replays": count(1),
        "hit_pooled": _SHARE,
        "arms": named(_ARM),
        "random": listed(_RANDOM),
    },
    {
        "asked_tokens": count(1),
        "prefix_tokens": count(1),
        "unseen_tokens": count(1),
        "rule": text,
        "budget": count(1),
        "chance": optional(number()),
        "dense_replies": listed(text),
        "references": listed(listed(text)),
        "seconds": number(),
        "stages_s": named(number()),
    },
)

_TIMES: Final = entries(
    {
        "suite": text,
        "boundary": one_of(*BOUNDARIES),
        "tokens": count(1),
        "seconds": named(entries({"samples": listed(number(), 1)})),
    }
)

_WINDOW: Final = entries(
    {
        "arm": text,
        "prefix_tokens": count(1),
        "state_error": number(),
        "same_reply_as_recompute": _SHARE,
    }
)

_RESULT: Final = entries(
    {
        "protocol": an_object,
        "device": entries({"name": text}),
        "arms": listed(entries({"arm": text})),
        "blocks": listed(_BLOCK),
        "refused": listed(entries({**_PLACE, "arms": named(text)})),
        "whole_window": optional(_WINDOW),
        "ttft": listed(_TIMES),
    }
)


def check_result(result: Mapping[str, Any]) -> None:
    """Refuse a result whose blocks could not be continued, put together or shown.

    Raises:
        ValueError, TypeError: naming the first entry that is wrong, and what is expected there.
    """
    _RESULT(result, "")
    names = [arm["arm"] for arm in result["arms"]]
    for index, block in enumerate(result["blocks"]):
        missing = [name for name in names if name not in block["arms"]]
        unknown = [name for name in block["arms"] if name not in names]
        if missing or unknown:
            said = f"has no {missing[0]!r}" if missing else f"has the unknown {unknown[0]!r:.60}"
            raise ValueError(f"blocks[{index}].arms {said}, the run's arms are expected")
    for index, entry in enumerate(result["refused"]):
        if not entry["arms"]:
            raise ValueError(f"refused[{index}].arms is empty, the refused arms are expected")
    seen: dict[tuple[Any, ...], str] = {}
    for part in ("blocks", "refused"):
        for index, entry in enumerate(result[part]):
            key = entry["task"], entry.get("asked_tokens", entry["tokens"]), entry["boundary"]
            place = f"{part}[{index}]"
            if (first := seen.setdefault(key, place)) != place:
                raise ValueError(
                    f"{first} and {place} are both {key[0]} at {key[1]} tokens, cached to the {key[2]}"
                )
