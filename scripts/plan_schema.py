"""Write `plans/plan.schema.json` from the pydantic models; `--check` only compares."""

import sys
from pathlib import Path

from hybridstate.plan.schema import json_schema

TARGET = Path(__file__).parents[1] / "plans" / "plan.schema.json"


def main(arguments: list[str]) -> int:
    """0 when the committed file is (now) what the models say, 1 when `--check` finds it stale."""
    wanted = json_schema()
    if "--check" in arguments:
        current = TARGET.read_text() if TARGET.exists() else ""
        if current != wanted:
            print(f"{TARGET} is stale: run `python scripts/plan_schema.py`", file=sys.stderr)
            return 1
        return 0
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
