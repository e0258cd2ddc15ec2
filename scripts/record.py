"""Turn what a verb printed with --json into the form kept in benchmarks/: where it came from first, then the result.

    scripts/record.py PRINTED RECORDED -- calibrate tiny-gdn --profile paper ...

The arguments after -- are the command line of that run, without folders of the machine.
"""

import json
import sys
from pathlib import Path

from hybridstate.provenance import readable_json


def recorded(printed: dict[str, object], arguments: list[str]) -> dict[str, object]:
    """The document with its provenance in front; folders that were written are left out."""
    result = dict(printed["result"])  # type: ignore[call-overload]
    kept = {key: value for key, value in result.items() if key not in ("provenance", "written")}
    return {
        "schema": printed["schema"],
        "command": printed["command"],
        "arguments": arguments,
        "model": printed["model"],
        "provenance": result["provenance"],
        "timing": printed["timing"],
        "warnings": printed["warnings"],
        "result": kept,
    }


def main() -> int:
    """Read, convert, write."""
    if len(sys.argv) < 5 or sys.argv[3] != "--":
        sys.stderr.write(f"{__doc__}\n")
        return 2
    document = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    Path(sys.argv[2]).write_bytes(readable_json(recorded(document, sys.argv[4:])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
