"""Options that `bench serve` and `bench simulate` have in common."""

from pathlib import Path
from typing import Annotated

import typer

TraceName = Annotated[
    str,
    typer.Option(
        "--trace",
        metavar="NAME",
        help="wildchat-shape, shared-prefix, no-sharing; sharegpt, messages, mooncake with --trace-file.",
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace-file",
        metavar="FILE",
        help="Recorded conversations; wildchat-shape takes WildChat's JSONL.",
        show_default=False,
    ),
]
Conversations = Annotated[
    int, typer.Option("--conversations", metavar="N", help="Conversations in the trace, at most.")
]
ArmNames = Annotated[
    list[str] | None,
    typer.Option(
        "--arm",
        metavar="NAME",
        help="nr, wr, int8, bf16, damp, nr+int8, wr+int8, damp+nr, damp+wr, with or without a cutoff "
        "(nr-16); repeatable. [default: all but bf16, wr+int8, damp+wr]",
        show_default=False,
    ),
]
Cutoffs = Annotated[
    list[int] | None,
    typer.Option(
        "--w-max",
        metavar="N",
        help="Cutoff in tokens, repeatable. [default: 16, 64]",
        show_default=False,
    ),
]
Ratios = Annotated[
    list[float] | None,
    typer.Option(
        "--ratio",
        metavar="X",
        help="Working set over dense slots, repeatable. [default: 0.5, 1, 1.5, 2, 3, 4]",
        show_default=False,
    ),
]
RunningLimits = Annotated[
    list[int] | None,
    typer.Option(
        "--limit",
        metavar="N",
        help="Running requests at once, repeatable: the first runs at every ratio, the others at the "
        "operating point. [default: 32, 16, 8]",
        show_default=False,
    ),
]
Clients = Annotated[int, typer.Option("--clients", metavar="N", help="Conversations at once.")]
Think = Annotated[
    float,
    typer.Option(
        "--think",
        metavar="S",
        help="Mean seconds before a client's next turn. 0 is the worst case of LRU.",
    ),
]
Seeds = Annotated[int, typer.Option("--seeds", metavar="N", help="Orders of the conversations.")]
Policy = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="NAME",
        help="What is evicted: lru, leaf-lru (prefixes that none extends first) or cost (fewest tokens "
        "saved per byte).",
    ),
]
Every = Annotated[
    int, typer.Option("--every", metavar="N", help="Also keep a state every N prompt tokens.")
]
BudgetScope = Annotated[
    str, typer.Option("--budget-scope", metavar="state|state+kv", help="What the bytes cover.")
]
Control = Annotated[
    bool, typer.Option("--control/--no-control", help="Also serve prompts that share nothing.")
]
Ranks = Annotated[int, typer.Option("--tp", metavar="P", help="Tensor-parallel ranks.")]
Balances = Annotated[
    list[str] | None,
    typer.Option(
        "--balance",
        metavar="MODE",
        help="Placement of the arms with a cutoff, repeatable: off, storage, hybrid. [default: off]",
        show_default=False,
    ),
]
