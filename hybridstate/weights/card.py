"""The model card of an exported checkpoint: what it is, what changed, what it saves and costs, how to make it again.

The source's own `README.md` is kept word for word as `README.original.md` (its licence and usage still hold); the card
takes its place because it is what people and the Hub read first. Fields of the source's front matter that say under
which terms and for what a model may be used are carried over. Nothing in the card depends on time, host or folders, so
two exports give the same bytes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from hybridstate.kernels.ring_reference import LONGEST
from hybridstate.plan.schema import PlanDocument
from hybridstate.plan.store import STATE_PLAN, Plan
from hybridstate.weights.rewrite import Layout

CARD: Final = "README.md"
KEPT: Final = "README.original.md"

_CARRIED: Final = (
    "license", "license_name", "license_link", "language", "pipeline_tag", "library_name", "datasets",
)  # fmt: skip


def write_card(
    folder: Path, plan: Plan, layout: Layout, verification: dict[str, Any] | None
) -> None:
    """Write the card into a finished export, moving the source's aside.

    Args:
        folder: the exported checkpoint.
        layout: what was done to its tensors.
        verification: findings of `verify` as JSON, None if it did not run.
    """
    card, kept = folder / CARD, folder / KEPT
    original = ""
    if card.is_file():
        if not kept.exists():  # a source may bring a file of that name: then its README is in it
            card.replace(kept)
            original = kept.read_text(encoding="utf-8", errors="replace")
        else:
            original = card.read_text(encoding="utf-8", errors="replace")
    card.write_text(
        model_card(plan, layout, verification, original=original), encoding="utf-8", newline="\n"
    )


def model_card(
    plan: Plan, layout: Layout, verification: dict[str, Any] | None, *, original: str = ""
) -> str:
    """Text of the card.

    Args:
        original: text of the source's card, for its front matter.
    """
    document = plan.document
    model = document.model
    parts = [
        _front_matter(document, original),
        f"# {model.name}, with its state in plan order",
        f"Base model: `{model.name}`"
        + (f" at revision `{model.revision}`" if model.revision else "")
        + f" ({model.family}, {len(model.layers)} of {model.num_layers} blocks keep a recurrent state). "
        "The model computes the same function: rows, channels and columns of its linear-attention tensors "
        f"were put in another order, so that an engine finds the state as `{STATE_PLAN}/` describes it.",
        *_section("What was changed", _changes(plan, layout)),
        *_section("What it saves", _savings(document)),
        *_section("Measured divergence", _divergence(document, verification)),
        *_section("Limits", _limits(document, layout)),
        *_section("Make it again", [_command(document)]),
    ]
    if original:
        parts.append(f"The card of the base model is kept as [{KEPT}]({KEPT}).")
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(title: str, body: Iterator[str] | list[str]) -> list[str]:
    text = "\n".join(body)
    return [f"## {title}", text] if text else []


def _front_matter(document: PlanDocument, original: str) -> str:
    model = document.model
    lines = ["---", *_carried(original)]
    if "/" in model.name:  # the Hub refuses a base model that is not an address
        lines += [f"base_model: {model.name.partition('@')[0]}", "base_model_relation: quantized"]
    lines += ["tags:", "- hybridstate", "---"]
    return "\n".join(lines)


def _carried(original: str) -> Iterator[str]:
    """Lines of the fields worth keeping, with the list items below them."""
    lines = original.splitlines()
    if not lines or lines[0].strip() != "---":
        return
    keeping = False
    for line in lines[1:]:
        if line.strip() == "---":
            return
        if not line.startswith((" ", "-")):
            keeping = line.partition(":")[0] in _CARRIED
        if keeping:
            yield line.rstrip()


def _changes(plan: Plan, layout: Layout) -> Iterator[str]:
    precision = plan.document.precision
    yield (
        f"- {len(layout.moves)} of {layout.tensors} tensors are permuted; the others are byte for byte "
        "the base model's."
    )
    if precision is not None and precision.key_order == "per-head":
        yield "- Key channels stay: each value head has an order of its own, which a kernel gathers."
    if precision is not None and precision.key_order != "per-head":
        owner = "value" if precision.key_order == "expand" else "key"
        kda = plan.document.model.kind == "kda"
        yield (
            f"- Key channels of each {owner} head: the {precision.k_hi} protected ones first, in q, k and their "
            "convolution" + (", the decay projection and `dt_bias`." if kda else ".")
        )
    if precision is not None and precision.value_order != "none":
        yield "- Value dims: " + (
            "an order of each head's own; the output norm's weight is folded into the output projection and is ones."
            if precision.value_order == "per-head"
            else "one order for all heads of a layer, the output norm with them."
        )
    if precision is not None and precision.value_scale:
        yield (
            "- Value scales `layers.{i}.value_scale` are in the plan and not in the weights: an engine stores the "
            "state over them and multiplies outputs by them."
        )
    grown = layout.growth
    if grown is not None:
        yield (
            f"- Every value head has a key head of its own: `{grown.field}` is {grown.after} instead of "
            f"{grown.before}, {len(grown.shapes)} tensors grew by {grown.added_bytes:,} bytes together, and the "
            f"convolution window of a sequence takes {grown.conv_after:,} bytes instead of {grown.conv_before:,}."
        )
    placement = plan.document.placement
    if placement is not None and placement.mode == "hybrid":
        yield f"- Heads: the bundles of {placement.tp} ranks one after the other."
    shapes = "shapes and shards" if grown is None else "other shapes and shards"
    yield f"- `config.json` names the plan under `{STATE_PLAN}`; names, dtypes, {shapes} are the base model's."
    yield f"- Plan `{plan.digest}`, layout `{plan.document.layout_id}`."


def _savings(document: PlanDocument) -> Iterator[str]:
    precision, accounting, selection = document.precision, document.accounting, document.selection
    if precision is not None:
        yield (
            f"- Live state of one sequence: {precision.state_dense_bytes:,} bytes in FP32, "
            f"{precision.state_packed_bytes:,} packed "
            f"({precision.state_dense_bytes / precision.state_packed_bytes:.2f}x, "
            f"{precision.bits_per_value:.3f} bits per value)."
        )
        every = precision.requantise_every
        if every > 1:
            yield (
                f"- It is written once in {every} updates: with the ring of inputs kept between, "
                f"{precision.bits_per_value_with_ring:.3f} bits per value. "
                + (
                    "`export-plan --kernels` writes that step as a module for engines."
                    if every <= LONGEST
                    else f"No kernel does that: they hold {LONGEST} at most."
                )
            )
    if accounting is not None and selection is not None:
        dense, ragged = accounting.temporal_dense_bytes, accounting.temporal_ragged_bytes
        full = (dense + accounting.conv_bytes) / max(1, ragged + accounting.conv_bytes)
        temporal = f"{dense / ragged:.2f}x" if ragged else "all of it"
        yield (
            f"- Cached prefix at a cutoff of {selection.w_max} tokens: {dense:,} bytes of temporal state become "
            f"{ragged:,} ({temporal} temporal, {full:.2f}x with the convolution window)."
        )


def _divergence(document: PlanDocument, found: dict[str, Any] | None) -> Iterator[str]:
    if found is None:
        yield "- Not compared with the base model when it was exported: `hybridstate verify BASE EXPORTED` does."
    else:
        yield (
            f"- Against the base model in float32: logits within {found['logit_error']:.1e}, states within "
            f"{found['state_error']:.1e} relative, "
            f"{'the same' if not found['differing'] else str(found['differing']) + ' other'} greedy tokens "
            f"({found['prompts']} x "
            f"{found['prompt_tokens']} tokens of {found['text']})."
        )
        if found.get("bf16"):
            yield f"- In BF16: {found['bf16']['ratio']:.3f} times the base model's own distance from float32."
    calibration = document.calibration
    rows = () if calibration is None else calibration.validation
    if rows:
        yield "\nState formats against FP32 states on the calibration's validation prompts, requantised at each step:\n"
        yield "| format | bits per value | KL (nats) | top-1 agreement | state error |\n|---|--:|--:|--:|--:|"
    for row in rows:
        yield f"| {row.format} | {row.bits_per_value:.3f} | {row.kl:.3g} | {row.top1:.4f} | {row.state_error:.3g} |"


def _limits(document: PlanDocument, layout: Layout) -> Iterator[str]:
    if layout.rounded:
        yield (
            f"- The output norm is folded into {layout.rounded} 16-bit projections, whose entries were rounded anew: "
            "outputs agree to that rounding (2^-9 of an entry in BF16), not to float32's."
        )
    yield "- The order alone saves nothing: an engine has to pack the state, or omit units, as the plan says."
    yield "- Convolution and prefix states saved with the base model do not fit this one, and the other way round."
    yield "- Sums run in another order, so logits agree to rounding and not bit for bit."
    calibration = document.calibration
    if calibration is not None:
        profile = calibration.protocol.get("profile", "unnamed")
        yield f"- Channels were chosen on the prompts of the `{profile}` profile; other text may favour others."
    yield from (f"- {note}" for note in document.provenance.notes)


def _command(document: PlanDocument) -> str:
    selection, calibration = document.selection, document.calibration
    options = "" if selection is None else f" --w-max {selection.w_max}"
    placement = document.placement
    if placement is not None:
        options += f" --tp {placement.tp} --balance {placement.mode}"
    precision = document.precision
    if precision is not None:
        value = "fold" if precision.value_order == "per-head" else precision.value_order
        options += f" --key-order {precision.key_order}" if precision.key_order != "shared" else ""
        options += f" --value-order {value}" if value != "none" else ""
        every = precision.requantise_every
        options += f" --requantise-every {every}" if every > 1 else ""
    formats = (
        ""
        if precision is None or precision.value_order == "none"
        else " --formats default,damp+reorder"
    )
    name = document.model.name
    lines = [
        "```",
        f"hybridstate export-plan {name}{options} --calibration calibration -o exported",
        "```",
    ]
    if calibration is not None:
        profile = calibration.protocol.get("profile", "quick")
        lines.append(
            f"after `hybridstate calibrate {name} --profile {profile}{formats} -o calibration` "
            f"(fingerprint `{calibration.fingerprint[:16]}`)."
        )
    return "\n".join(lines)
