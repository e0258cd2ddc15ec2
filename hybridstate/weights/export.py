"""What `export-plan` wrote, or would write."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridstate.plan.store import Plan
from hybridstate.weights.rewrite import Layout


@dataclass(frozen=True, slots=True, eq=False)
class ExportedPlan:
    """The result of `api.export_plan`.

    Attributes:
        path: the output folder: a plan bundle, or a checkpoint with its bundle in `state_plan/`.
        plan: the plan as written.
        layout: what was done to the checkpoint, None for a bundle alone.
        written: False for a dry run.
        verification: JSON form of the numeric check, None if it did not run.
    """

    path: Path
    plan: Plan
    layout: Layout | None
    written: bool
    verification: dict[str, Any] | None = None

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
        }
        if self.layout is not None:
            result["checkpoint"] = {
                "tensors": self.layout.tensors,
                "moved": sorted(self.layout.moves),
                "shards": [file.name for file in self.layout.shards],
                "side_files": [str(name) for name in self.layout.side_files],
                "left_out": [str(name) for name in self.layout.left_out],
                "bytes": self.layout.nbytes,
            }
        return result
