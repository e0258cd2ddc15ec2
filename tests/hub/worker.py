"""Opens models for the tests in a process whose `HF_ENDPOINT` is the stand-in: one JSON line in, one out.

`HF_ENDPOINT` is read when `huggingface_hub` is first imported, so it needs a process of its own; one
process for all tests saves the imports.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from hybridstate.checkpoint import open_checkpoint, transport
from hybridstate.errors import HybridStateError

transport.FIRST_WAIT_SECONDS = 0.002  # type: ignore[misc]


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Analyse or open one model."""
    for name, value in job.get("environment", {}).items():
        os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    options = {"offline": job.get("offline", False), "cache_dir": Path(job["cache"])}
    try:
        checkpoint = open_checkpoint(job["model"], weights=job.get("weights", False), **options)
        names = checkpoint.all_decay_tensors
        opened = 0 if checkpoint.origin is None else checkpoint.origin.requests
        digests = checkpoint.digests()
        origin = checkpoint.origin
        return {
            "ok": True,
            "commit": None if origin is None else origin.commit,
            "requests": None if origin is None else origin.requests,
            "requests_before_tensors": opened,
            "received": None if origin is None else origin.received,
            "cost": [[read.part, read.requests, read.nbytes] for read in checkpoint.cost(names)],
            "digests": digests,
            "family": checkpoint.spec.name,
            "size": checkpoint.size,
            "files": len(checkpoint.files),
            "tensors": checkpoint.bytes_read,
            "notes": checkpoint.notes,
            "warnings": checkpoint.warnings,
        }
    except HybridStateError as error:
        return {"ok": False, "exit": error.exit_code, **error.to_json()}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)  # noqa: T201
