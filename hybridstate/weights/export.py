"""The last stage of `export-plan`: bundle or checkpoint, kernels, and what was written of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybridstate.checkpoint import Checkpoint
from hybridstate.errors import PlanMismatch, UsageError
from hybridstate.kernels.emit import MODULE_FILE, StepSpec, emit
from hybridstate.kernels.layout import PackedLayout
from hybridstate.plan.compare import verify_against
from hybridstate.plan.store import OUTPUT_MARKS, Array, Plan, read_plan, write_files
from hybridstate.provenance import check_writable, fresh_folder, write_file
from hybridstate.weights.card import write_card
from hybridstate.weights.rewrite import Layout, write_checkpoint

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, eq=False)
class ExportedPlan:
    """The result of `api.export_plan`.

    Attributes:
        path: the output folder: a plan bundle, or a checkpoint with its bundle in `state_plan/`.
        plan: the plan as written.
        layout: what was done to the checkpoint, None for a bundle alone.
        written: False for a dry run.
        verification: JSON form of the numeric check, None if it did not run.
        kernels: the emitted module, None if none was asked for.
        warnings: of the analysis behind the selection, one line each.
    """

    path: Path
    plan: Plan
    layout: Layout | None
    written: bool
    verification: dict[str, Any] | None = None
    kernels: Path | None = None
    warnings: tuple[str, ...] = ()

    @property
    def digest(self) -> str | None:
        """Content digest of the plan; None for a dry run whose weights would decide it."""
        return self.plan.digest if self.written or self.layout is None else None

    def to_json(self) -> dict[str, Any]:
        """Digest, blocks present, and for a checkpoint its tensors, files and bytes."""
        document = self.plan.document
        result: dict[str, Any] = {
            "path": str(self.path),
            "written": self.written,
            "digest": self.digest,
            "selection": document.selection is not None,
            "precision": document.precision is not None,
            "arrays": len(self.plan.arrays),
            "array_bytes": sum(array.nbytes for array in self.plan.arrays.values()),
            "checkpoint": None,
            "verification": self.verification,
            "kernels": None if self.kernels is None else str(self.kernels),
        }
        if self.layout is not None:
            result["checkpoint"] = {
                "tensors": self.layout.tensors,
                "moved": sorted(self.layout.moves),
                "shards": [file.name for file in self.layout.shards],
                "side_files": [str(name) for name in self.layout.side_files],
                "left_out": [str(name) for name in self.layout.left_out],
                "bytes": self.layout.nbytes,
                "expanded": self.layout.growth and self.layout.growth.to_json(),
            }
        return result


def write_export(
    checkpoint: Checkpoint,
    plan: Plan,
    layout: Layout | None,
    target: Path,
    *,
    kernels: Path | None = None,
    check: Callable[[Path], dict[str, Any]] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> ExportedPlan:
    """Write everything, whole or not at all.

    Args:
        layout: what to do with the weights; None writes the bundle alone.
        target: the output folder.
        kernels: folder of the emitted module.
        check: compares the written checkpoint with its original, gives its findings as JSON.
        force: replace an earlier export.
        progress: called with (stage, done, total).

    Raises:
        UsageError, PlanMismatch: see `kernel_file` and `step_spec`.
    """
    verification = None
    with fresh_folder(target, force=force, replaces=OUTPUT_MARKS) as folder:
        if layout is None:
            write_files(plan, folder)
        else:
            plan = write_checkpoint(checkpoint, plan, layout, folder, progress=progress)
        if check is not None:
            verify_against(read_plan(folder), checkpoint)
            if layout is not None:
                verification = check(folder)
        if layout is not None:
            write_card(folder, plan, layout, verification)
    file = None
    if kernels is not None:  # after the folder has appeared: it may lie inside
        file = kernels / MODULE_FILE
        write_file(file, emit(step_spec(plan)).encode())
    return ExportedPlan(target, plan, layout, True, verification, file)


def check_kernels(plan: Plan, kernels: Path | None, target: Path, *, force: bool) -> None:
    """Refuse before the first byte what could not be emitted.

    Raises:
        UsageError: the plan has no packed state, or the module exists already or cannot be written.
    """
    if kernels is None:
        return
    precision = plan.document.precision
    if precision is not None:
        step_spec(plan)
    else:
        raise UsageError(
            "there is no kernel for a plan without a packed state", hint="add --calibration DIR"
        )
    file = kernels / MODULE_FILE
    try:
        check_writable(file)
        taken = file.is_dir() or kernels.is_file()
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}", file=str(file)) from error
    if taken:
        what = f"{kernels} is a file" if kernels.is_file() else f"{file} is a folder"
        raise UsageError(f"cannot write {file}: {what}", file=str(file))
    inside = target.resolve() in file.resolve().parents
    if file.exists() and not (force or inside):
        raise UsageError(
            f"{file} exists already", hint="add --force, or name another folder", file=str(file)
        )


def step_spec(plan: Plan) -> StepSpec:
    """What the emitted module is specialised to.

    Raises:
        PlanMismatch: the plan has no packed state, or its layers differ in their dimensions.
        NumericError: it writes a state less often than the ring kernels can.
    """
    document, first = plan.document, plan.layers[0]
    precision = document.precision
    sizes = {(n.key_heads, n.value_heads, n.key_dim, n.value_dim) for n in plan.layers}
    if precision is None or len(sizes) > 1:
        raise PlanMismatch("one module needs one packed layout for all linear layers")
    keys, values, scales = {}, {}, {}
    for layer in plan.layers:
        keys[layer.index] = plan.key_order(layer.index, "exported")
        values[layer.index] = plan.value_order(layer.index, "exported")
        scales[layer.index] = plan.value_scale(layer.index, "exported")
    return StepSpec(
        layout=PackedLayout(first.key_dim, first.value_dim, precision.k_hi, precision.group),
        key_heads=first.value_heads if plan.expands_keys else first.key_heads,
        heads=first.value_heads,
        per_channel=document.model.kind == "kda",
        key_index=_table(keys, moving=True),
        value_index=_table(values, moving=True),
        value_scale=_table(scales, moving=False),
        every=precision.requantise_every,
        model=document.model.name,
        digest=plan.digest,
    )


def _table(arrays: Mapping[int, Array | None], *, moving: bool) -> dict[int, Any]:
    """Rows of every block's array; empty where no block has one, or none that moves anything."""
    found = {block: array for block, array in arrays.items() if array is not None}
    if moving and all((array == np.arange(array.shape[1])).all() for array in found.values()):
        return {}  # a block without an entry would be a missing key: all blocks or none
    return {block: array.tolist() for block, array in found.items()}
