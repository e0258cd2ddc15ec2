"""The table of docs/reading.md: what reading each released layout costs, from benchmarks/reading.json."""

import json
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def reading() -> str:
    """One row per release: size, shards, requests, and bytes by part."""
    path = BENCHMARKS / "reading.json"
    if not path.exists():
        return ""
    document = json.loads(path.read_text())
    lines = [
        "| layout | size | shards read | requests | index | headers | decay tensors | all received |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in document["releases"]:
        parts = {name: nbytes for name, _, nbytes in row["parts"]}
        headers = next(nbytes for name, nbytes in parts.items() if name.startswith("headers"))
        tensors = next(nbytes for name, nbytes in parts.items() if name.endswith("tensors"))
        index = parts.get("model.safetensors.index.json")
        cells = (
            row["name"],
            f"{row['bytes'] / 1e9:,.1f} GB",
            f"{row['touched']} of {row['shards']}",
            str(row["requests"]),
            "-" if index is None else f"{index:,}",
            f"{headers:,}",
            f"{tensors:,}",
            f"{row['received']:,}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    lines.append(
        f"Source: [reading.json](../benchmarks/reading.json), huggingface_hub "
        f"{document['huggingface_hub']}; {document['synthetic']}. Bytes received include file list and "
        "config; a second run at a commit, or offline, made no request in any row."
    )
    return "\n".join(lines)
