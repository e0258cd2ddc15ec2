"""Write docs/verification.md: export and check a random model of every family that transformers runs.

Takes some minutes: every model is loaded four times. `python scripts/verification.py`, from the project's root.
"""

import sys
import tempfile
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hybridstate.provenance import environment  # noqa: E402
from hybridstate.quality.verify import Verification  # noqa: E402
from tests.quality.verified import EMBEDDED, RELEASED, SAVED, verified  # noqa: E402

PAGE = ROOT / "docs" / "verification.md"
HEAD = """# Exported against original

The two embedded models, and random tiny models of every GDN and KDA family that transformers runs, exported under a
random (synthetic) key order and compared by `hybridstate verify`. Float32 errors are relative to the norm, at most
1e-5; float32 tokens are greedy and all equal. BF16 is the distance of all logits from float32, of the original and of
the exported model: their ratio may be 1.05. The last column decodes with the states in the runtime's packed pool,
quantisation off (every key row FP16), against the original on a dense FP16 pool; `-` where the attention cache of the
family holds more than keys and values, which the runtime does not continue.

| model | tensors same / moved | logits | states | BF16 original | BF16 exported | ratio | packed pool |
|---|--:|--:|--:|--:|--:|--:|--:|
"""


def row(name: str, found: Verification) -> str:
    low, packed = found.bf16, found.packed
    assert low is not None
    return (
        f"| {name} | {found.tensors.same} / {len(found.tensors.moved)} | {found.logit_error:.1e} "
        f"| {found.state_error:.1e} | {low.original_error:.2e} | {low.exported_error:.2e} "
        f"| {low.ratio:.3f} | {'-' if packed is None else f'{packed.logit_error:.1e}'} |\n"
    )


def main() -> int:
    """Run every family, write the page."""
    warnings.simplefilter("ignore")
    text = HEAD
    for name in (*EMBEDDED, *RELEASED, *SAVED):
        title = f"{name}, saved by transformers" if name in SAVED else name
        with tempfile.TemporaryDirectory() as folder:
            found = verified(name, Path(folder))
        if found is not None:
            text += row(title, found)
            print(title, flush=True)
    versions = environment()
    text += (
        "\nEmbedded models: 4 texts of 192 tokens of held-out prose, 32 new tokens each; random models: 2 texts of "
        "32, 6 new\n"
        f"tokens. On a CPU, torch {versions['torch']}, "
        f"transformers {versions['transformers']}. Written by `scripts/verification.py`.\n"
        "olmo_hybrid as transformers saves it is refused: its convolution is split in the wrong places.\n"
    )
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
