"""Two plans side by side, and a plan against a checkpoint. No torch."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridstate.checkpoint import Checkpoint
from hybridstate.errors import PlanMismatch
from hybridstate.plan.schema import Digests, to_content
from hybridstate.plan.store import Array, Order, Plan


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A value of `plan.json` that differs; `None` where one side has no such field."""

    path: str
    left: Any
    right: Any


@dataclass(frozen=True, slots=True)
class ArrayDifference:
    """An array that differs: how many entries and the first place, or the reason in words."""

    name: str
    what: str
    changed: int
    first: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """Everything in which two plans differ; digests and array checksums are left out."""

    left: str
    right: str
    fields: tuple[FieldDifference, ...]
    arrays: tuple[ArrayDifference, ...]

    @property
    def same(self) -> bool:
        return self.left == self.right

    def to_json(self) -> dict[str, Any]:
        """JSON-able: digests of both, field and array differences."""
        return {
            "same": self.same,
            "left": self.left,
            "right": self.right,
            "fields": [{"path": f.path, "left": f.left, "right": f.right} for f in self.fields],
            "arrays": [
                {
                    "name": a.name,
                    "what": a.what,
                    "changed": a.changed,
                    "first": None if a.first is None else list(a.first),
                }
                for a in self.arrays
            ],
        }


def diff(left: Plan, right: Plan) -> PlanDiff:
    """Field by field and array by array."""
    fields = _compare_values("", _comparable(left), _comparable(right))
    arrays = []
    for name in sorted(left.arrays.keys() | right.arrays.keys()):
        found = _compare_arrays(name, left.arrays.get(name), right.arrays.get(name))
        if found is not None:
            arrays.append(found)
    return PlanDiff(left.digest, right.digest, tuple(fields), tuple(arrays))


def _comparable(plan: Plan) -> dict[str, Any]:
    content = to_content(plan.document)
    del content["content_digest"], content["arrays"]
    return content


def _compare_values(path: str, left: Any, right: Any) -> Iterator[FieldDifference]:
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted(left.keys() | right.keys()):
            inner = f"{path}.{key}" if path else key
            yield from _compare_values(inner, left.get(key), right.get(key))
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for position, (a, b) in enumerate(zip(left, right, strict=True)):
            yield from _compare_values(f"{path}[{position}]", a, b)
    elif left != right:
        yield FieldDifference(path, left, right)


def _compare_arrays(name: str, left: Array | None, right: Array | None) -> ArrayDifference | None:
    if left is None or right is None:
        present = right if left is None else left
        side = "right" if left is None else "left"
        return ArrayDifference(
            name, f"only on the {side}", 0 if present is None else present.size, None
        )
    if left.shape != right.shape or left.dtype != right.dtype:
        what = f"{left.dtype} {list(left.shape)} against {right.dtype} {list(right.shape)}"
        return ArrayDifference(name, what, max(left.size, right.size), None)
    if left.tobytes() == right.tobytes():
        return None
    size = left.dtype.itemsize
    bits = [np.frombuffer(a.tobytes(), np.uint8).reshape(-1, size) for a in (left, right)]
    changed = (bits[0] != bits[1]).any(axis=1)
    flat = int(np.flatnonzero(changed)[0])
    first = tuple(int(i) for i in np.unravel_index(flat, left.shape))
    what = f"{left[first]} against {right[first]} at {list(first)}"
    return ArrayDifference(name, what, int(changed.sum()), first)


def checkpoint_digests(checkpoint: Checkpoint) -> Digests:
    """What a plan recognises a checkpoint by; reads convolution and decay tensors, no others."""
    return Digests(**checkpoint.digests(), order=_order_digest(checkpoint))


def _order_digest(checkpoint: Checkpoint) -> str:
    """sha256 over name, dtype, shape and bytes of each layer's convolution and decay tensors.

    Key order, value order and head order all move convolution channels (and, for KDA, `dt_bias`),
    so the two checkpoints of a plan differ here although their shapes agree.
    """
    digest = hashlib.sha256()
    names = _order_tensors(checkpoint)
    checkpoint.prefetch(names)
    for name in names:
        entry = checkpoint.entries[name]
        shape = ",".join(str(size) for size in entry.shape)
        digest.update(f"{name} {entry.dtype} {shape}\n".encode())
        digest.update(checkpoint.read_raw(name))
    return digest.hexdigest()


def _order_tensors(checkpoint: Checkpoint) -> list[str]:
    family = checkpoint.spec.family
    return [
        name
        for layer in checkpoint.spec.layers
        for name in sorted(n for n in checkpoint.entries if n.startswith(layer.prefix))
        if "conv1d" in name.removeprefix(layer.prefix)
        or name.removeprefix(layer.prefix) in (family.a_log, family.dt_bias)
    ]


def verify_against(plan: Plan, checkpoint: Checkpoint) -> Order:
    """Which of its two checkpoints a plan is looking at: the original or the exported one.

    Raises:
        PlanMismatch: neither; the first differing digest of both is shown.
    """
    found = checkpoint_digests(checkpoint)
    model = plan.document.model
    if found == model.original:
        return "original"
    if model.exported is not None and found == model.exported:
        return "exported"
    nearest = model.original
    if model.exported is not None and _agreement(found, model.exported) > _agreement(
        found, nearest
    ):
        nearest = model.exported
    part = next(n for n in Digests.model_fields if getattr(found, n) != getattr(nearest, n))
    mine, theirs = getattr(found, part), getattr(nearest, part)
    raise PlanMismatch(
        f"the plan was made for {model.name} with {part} digest {theirs[:12]}, {checkpoint.name} "
        f"has {mine[:12]}",
        hint="give the checkpoint the plan was exported from or to, or export a new plan",
        model=checkpoint.name,
        digest=part,
        found=mine,
        expected=theirs,
    )


def _agreement(left: Digests, right: Digests) -> int:
    return sum(getattr(left, n) == getattr(right, n) for n in Digests.model_fields)
