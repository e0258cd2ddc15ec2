"""Write docs/verification.md: exports of every family that transformers runs, compared with their originals.

    python scripts/verification.py            both tables, some minutes: every model is loaded a dozen times
    python scripts/verification.py full-size  only the table of sparse full-size exports (163 and 98 GB, little on disk)
    python scripts/verification.py families   only the tables of compared models; more words name some of them

The part that is not run stays as it is.
"""

import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hybridstate.provenance import environment  # noqa: E402
from hybridstate.quality.verify import Verification  # noqa: E402
from tests.plan.calibrated import write_calibration  # noqa: E402
from tests.quality.verified import EMBEDDED, EVERYTHING, RELEASED, SAVED, verified  # noqa: E402
from tests.released import BY_NAME, write  # noqa: E402
from tests.weights.test_full_size import MEASURED, allocated, fill  # noqa: E402

PAGE = ROOT / "docs" / "verification.md"
HEAD = """# Exported against original

The two embedded models, and random tiny models of every GDN and KDA family that transformers runs, exported under
calibrated orders and compared by `hybridstate verify`. Float32 errors are relative to the norm, at most 1e-5; float32
tokens are greedy and all equal. BF16 is the distance of all logits from float32, of the original and of the exported
model: their ratio may be 1.05. The last two columns decode with the states in the runtime's pools, quantisation off:
*recurrence* with FP32 states in the plan's coordinates against the original's FP32 states (key order, value order and
value scale: DAMP Eq. 17 and 18), at most 1e-5; *packed pool* with every key row in FP16 against the original on a dense
FP16 pool, where with value scales FP16 rounds other values.

"""
COLUMNS = (
    "| model | tensors same / moved | logits | states | BF16 original | BF16 exported | ratio | recurrence "
    "| packed pool |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|\n"
)
TABLES: Final[dict[str, tuple[str, dict[str, str]]]] = {
    "families: key order": (
        "## Key order\n\nThe default: key channels of a key head, in the order its value heads share.",
        {},
    ),
    "families: every order": (
        "## Key order of each value head, value order and value scales\n\n"
        "`--key-order expand --value-order common`: q and k replicated where value heads share a key head, one value "
        "order per layer, value scales outside the weights.",
        EVERYTHING,
    ),
    "families: folded norm": (
        "## Value order of each head, output norm folded\n\n"
        "`--value-order fold`, for models whose projections are float32; a fold into 16-bit projections rounds their "
        "entries anew (the embedded models below: compared at that rounding, and within 1.05 in BF16).",
        {"value_order": "fold"},
    ),
}
HOW: Final = "families: how"
SIZE: Final = "full size"
ORDER: Final = (HOW, *TABLES, SIZE)
PART: Final = re.compile(
    r"<!-- generated: (?P<name>[^(]+) \(scripts/verification\.py\) -->\n(?P<body>.*?)<!-- end -->",
    re.S,
)
FULL_SIZE: Final = {
    "Qwen3-Next-80B-A3B-Instruct": ({}, {"key_order": "expand"}),
    "Qwen3.6-35B-A3B": ({},),
    "Kimi-Linear-48B-A3B-Instruct": ({},),
}


def row(name: str, found: Verification) -> str:
    low, packed = found.bf16, found.packed
    assert low is not None
    assert packed is not None
    return (
        f"| {name} | {found.tensors.same} / {len(found.tensors.moved)} | {found.logit_error:.1e} "
        f"| {found.state_error:.1e} | {low.original_error:.2e} | {low.exported_error:.2e} "
        f"| {low.ratio:.3f} | {packed.recurrence_error:.1e} | {packed.logit_error:.1e} |\n"
    )


def family_table(orders: dict[str, str], names: tuple[str, ...]) -> str:
    text = COLUMNS
    for name in names:
        title = f"{name}, saved by transformers" if name in SAVED else name
        with tempfile.TemporaryDirectory() as folder:
            found = verified(name, Path(folder), **orders)
        if found is not None:
            text += row(title, found)
            print(title, orders, flush=True)
    return text


def full_size_table() -> str:
    """Time, peak memory and bytes of exports of sparse folders, each in a process of its own."""
    text = (
        "| release | options | GB | tensors moved | seconds | peak MB | of them before | largest shard MB "
        "| peak / shard | MB on disk |\n|---|---|--:|--:|--:|--:|--:|--:|--:|--:|\n"
    )
    for name, variants in FULL_SIZE.items():
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            model = write(BY_NAME[name], place / "model")
            found = measured(model, place, variants)
            for options, result in zip(variants, found, strict=True):
                shown = " ".join(f"`--{k.replace('_', '-')} {v}`" for k, v in options.items())
                text += f"| {name} | {shown or 'default'} | {result} |\n"
                print(name, options, result, flush=True)
    return text


def measured(model: Path, place: Path, variants: Any) -> list[str]:
    from hybridstate.checkpoint import open_checkpoint

    source = open_checkpoint(model)
    first = source.spec.layers[0]
    suffixes = ("in_proj_qkvz.weight", "in_proj_qkv.weight", "q_proj.weight")
    name = next(first.prefix + s for s in suffixes if first.prefix + s in source.entries)
    fill(model, name, 1)
    calibration = write_calibration(place / "calibration", model, k_hi=16)
    sizes = [file.stat().st_size for file in source.files]
    rows = []
    for number, options in enumerate(variants):
        out = place / f"out{number}"
        code = MEASURED.replace(
            "calibration=sys.argv[3]", f"calibration=sys.argv[3], **{options!r}"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(model), str(out), str(calibration)],
            capture_output=True, text=True, check=True, cwd=ROOT,
        )  # fmt: skip
        found = json.loads(done.stdout.splitlines()[-1])
        rows.append(
            f"{sum(sizes) / 1e9:.1f} | {found['moved']} | {found['seconds']:.1f} | {found['peak'] / 1e6:.0f} "
            f"| {found['before'] / 1e6:.0f} | {max(sizes) / 1e6:.0f} | {found['peak'] / max(sizes):.2f} "
            f"| {allocated(out) / 1e6:.0f}"
        )
    return rows


def replace_part(name: str, body: str) -> None:
    """Exchange one generated part of the page; the page is read afresh, others may have written."""
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    parts = {found["name"]: found["body"] for found in PART.finditer(page)}
    parts[name] = f"\n{body.strip()}\n\n"
    PAGE.write_text(whole(parts), encoding="utf-8")


def whole(parts: Mapping[str, str]) -> str:
    """The page: what is compared and how first, then its tables in `ORDER`."""
    return HEAD + "\n".join(
        f"<!-- generated: {name} (scripts/verification.py) -->\n{parts[name]}<!-- end -->\n"
        for name in ORDER
        if name in parts
    )


def main() -> int:
    """Run what was asked for, write the page after each table."""
    warnings.simplefilter("ignore")
    which = sys.argv[1] if len(sys.argv) > 1 else "all"
    versions = environment()
    ran = f"On a CPU, torch {versions['torch']}, transformers {versions['transformers']}."
    if which in ("all", "families"):
        for name, (title, orders) in TABLES.items():
            if sys.argv[2:] and not any(word in name for word in sys.argv[2:]):
                continue
            names: tuple[str, ...] = (*EMBEDDED, *RELEASED, *SAVED)
            if orders.get("value_order") == "fold":
                names = (*EMBEDDED, *SAVED)
            table = family_table(orders, names)
            replace_part(name, f"{title}\n\n{table}\n{ran}")
        notes = (
            "Embedded models: calibrated on 3 x 3 texts of 128 tokens with 96 new ones, compared on 4 texts of 192 "
            "tokens of held-out prose and 32 new tokens each. Random models: calibrated on 3 x 3 texts of 24 tokens "
            "with 20 new ones (their bytes folded into the vocabulary where there is no tokenizer), compared on 2 "
            "texts of 32 and 6 new tokens. Their 8 to 16 value dims share one scale group, so calibration leaves them "
            "in order and only scales act there; random value orders of every kind are compared in "
            "`tests/weights/test_value_order.py`. olmo_hybrid as transformers saves it is refused: its convolution is "
            "split in the wrong places."
        )
        replace_part(HOW, notes)
    if which in ("all", "full-size"):
        body = (
            "## Exports at full size\n\n"
            "Sparse folders with the names, shapes, dtypes and shards of the release (synthetic values; one projection "
            "filled with random bytes, the rest holes, so seconds are those of headers and seeks and not of a disk). "
            "Peak memory is that of the whole process, torch and numpy imported.\n\n"
        )
        replace_part(SIZE, body + full_size_table() + f"\n{ran}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
