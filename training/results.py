# ruff: noqa: E501 (table rows and card text stay on one line)
"""``python -m training.results DIR``: gather the figures of a run into benchmarks/training.json and the cards."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from training import release

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "benchmarks" / "training.json"
TASKS = ("recall", "registers", "latest", "counts", "tracking")
BARS = (
    ("held-out prose at most 2.0 bits per byte", "prose"),
    ("recall at least 95 % at 1k tokens", "recall"),
    ("an overwrite task at least 90 % at 1k tokens", "overwrite"),
    ("10 to 90 % of units retained at W_max 64", "retained"),
    ("zeroed states cost at least 20 points on a task", "need"),
    ("and under 0.1 bit per byte of prose after the filler", "prose_after"),
)


def gather(folder: Path, others: Path | None = None) -> dict[str, Any]:
    """Return the record of the run in ``folder``, with the 6-gram yardstick and the recipes tried before."""
    from training import ngram

    models = {n: json.loads((folder / f"{k}.json").read_text()) for k, n in release.NAMES.items()}
    record: dict[str, Any] = {
        "what": "training and evaluation of the embedded models",
        "command": "python -m training -o DIR --check",
        "prose_6gram_bits_per_byte": ngram.baseline(),
        "models": models,
    }
    if others is not None:
        record["recipes_tried"] = json.loads(others.read_text())
    return record


def passed(model: dict[str, Any]) -> dict[str, bool]:
    """Return which bar ``model`` meets."""
    scores, need = model["exact_match"], model["need_of_state"]["1024"]
    cost = max(need["nothing"][t] - need["zero-linear"][t] for t in TASKS)
    prose = need["zero-linear"]["prose_bits_per_byte"] - need["nothing"]["prose_bits_per_byte"]
    return {
        "prose": model["prose_bits_per_byte"] <= 2.0,
        "recall": scores["recall"]["1024"] >= 0.95,
        "overwrite": max(scores["registers"]["1024"], scores["latest"]["1024"]) >= 0.9,
        "retained": 0.1 <= model["retained"]["64"]["trained"] <= 0.9,
        "need": cost >= 0.2,
        "prose_after": prose < 0.1,
    }


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(r) + " |" for r in [head, ["---"] * len(head), *rows]]
    return "\n".join(lines)


def scores_table(model: dict[str, Any]) -> str:
    """Return the exact-match table of one model."""
    rows = [
        [
            t,
            *(_percent(model["exact_match"][t][n]) for n in ("1024", "6144")),
            _percent(model["exact_match"][t]["chance"]),
        ]
        for t in TASKS
    ]
    return _table(["task", "1,024 tokens", "6,144 tokens", "chance"], rows)


def need_table(model: dict[str, Any], tokens: str) -> str:
    """Return the table of disturbed restores at one context length."""
    found = model["need_of_state"][tokens]
    tasks = [t for t in TASKS if t in found["nothing"]]
    rows = [
        [arm, *(_percent(v[t]) for t in tasks), f"{v['prose_bits_per_byte']:.3f}"]
        for arm, v in found.items()
    ]
    return _table(["restored with", *tasks, "prose after the filler, bits per byte"], rows)


def retained_table(model: dict[str, Any]) -> str:
    """Return the table of retained units per cutoff."""
    rows = [
        [cutoff, *(_percent(v[k]) for k in ("initial", "trained", "crossed"))]
        for cutoff, v in model["retained"].items()
    ]
    return _table(["W_max", "initial", "trained", "crossed in training"], rows)


def card(name: str, record: dict[str, Any]) -> str:
    """Return the model card of ``name``."""
    model = record["models"][name]
    run, versions = model["training"], model["versions"]
    recipe = run["recipe"]
    gdn = name == "tiny-gdn"
    shape = (
        "8 layers, 3 Gated DeltaNet to 1 attention; 4 key and 8 value heads of 128 x 128, hidden size 160, MLP 256, "
        "4 attention heads of 32 with 2 KV heads; transformers `qwen3_5_text`, tensors `model.language_model.layers.*`"
        if gdn
        else "8 layers, 3 Kimi Delta Attention to 1 MLA; 4 heads of 128 x 128, hidden size 192, MLP 384 (all dense), "
        "4 MLA heads of 24 + 8 with a latent of 32; transformers `kimi_linear`, released tensor names, 1-based `kda_layers`"
    )
    stages = "; ".join(f"{s['steps']} steps of {s['rows']} x {s['length']}" for s in run["stages"])
    errors = ", ".join(f"{k} {v:.1e}" for k, v in model.get("kernel_error", {}).items())
    met = passed(model)
    bars = "\n".join(f"- {text}: {'reached' if met[key] else 'not reached'}" for text, key in BARS)
    parameters = "5.2" if gdn else "5.5"
    return f"""---
license: apache-2.0
language: en
library_name: transformers
---
# {name}

A byte-level language model of {parameters} M parameters whose recurrent state is needed: made to try out state compression in
minutes on a laptop, not to be useful as a language model. {shape}. BF16 safetensors, decay parameters F32 where the
released checkpoints store F32. One token is one byte.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("hybridstate/models/{name}")
model = AutoModelForCausalLM.from_pretrained("hybridstate/models/{name}", dtype="float32")
```

## Figures
Recorded in `benchmarks/training.json`; evaluated in BF16 on {versions["device"]}, on the weights as stored.

{bars}

Held-out prose (*Bleak House*, never trained on; windows of 2,048 bytes): **{model["prose_bits_per_byte"]:.3f} bits per
byte**. An interpolated byte 6-gram of the same training prose gets {record["prose_6gram_bits_per_byte"]:.3f} on the same windows.

Exact match over {model["questions"]} questions of unseen seeds (`hybridstate/quality/tasks.py`; 64 neutral tokens stand
between context and question):

{scores_table(model)}

What carries the answer: the cache of the context is restored with a part zeroed, or with the recurrent states of
another prompt, before the filler and the question ("nothing": as it was). Contexts of 1,024 tokens, {model["questions"]} questions:

{need_table(model, "1024")}

At 6,144 tokens (256 questions; the prose column is the one above):

{need_table(model, "6144")}

Units ({"value heads" if gdn else "key channels"}) whose static horizon `ln(1e-3) / g`, `g = -exp(A_log) softplus(dt_bias - 0.3)`, exceeds `W_max`:

{retained_table(model)}

## Recipe
`python -m training -o DIR`, seed {recipe["seed"]}, {run["seconds"]:.0f} s of training on one {versions["device"]}: {run["tokens"] / 1e6:.0f} M tokens,
{stages}. AdamW (0.9, 0.95), learning rate {recipe["lr"]:g} with 2 % warm-up and cosine decay to 4 %, {recipe["decay_rate"]:g} times that for `A_log` and
`dt_bias`, weight decay 0.05 on matrices only, gradient norm 1, BF16 autocast over FP32 weights. Rows: {100 * recipe["task_share"]:.1f} % tasks,
the rest prose, Python source and mathematics (80 : 12 : 8); loss = language bytes + {recipe["answer_weight"]:g} x answer bytes, each averaged over
its own bytes. Half of the rows of every batch see only the last 64 to 128 tokens in full attention, so the recurrent
state must carry what lies further back. Initially `exp(A_log)` is uniform in 1 to 16 and softplus(`dt_bias`) log-uniform
in 1e-4 to 0.1. Versions: torch {versions["torch"]}, transformers {versions["transformers"]}, triton {versions["triton"]}, fla-core {versions["fla-core"]}.

The recurrence in training is fla-core's `chunk_kda`{" with the scalar decay broadcast over the key channels" if gdn else ""}. Relative error
against a float64 recurrence on the same BF16 inputs: {errors}.

## Data and licence
Weights: Apache-2.0. Trained on English prose from Standard Ebooks (CC0), the Python standard library's source (PSF-2.0),
GSM8K and the problems of MATH (both MIT), and generated tasks (this repository). No share-alike text.
"""


def main() -> int:
    """Write the record (when a folder is given) and both cards."""
    if len(sys.argv) > 1:
        others = Path(sys.argv[2]) if len(sys.argv) > 2 else None
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps(gather(Path(sys.argv[1]), others), indent=1) + "\n")
    record = json.loads(RECORD.read_text())
    for name in release.NAMES.values():
        (ROOT / "hybridstate" / "models" / name / "README.md").write_text(card(name, record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
