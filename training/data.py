"""Training batches: language and generated tasks, deterministic in (seed, step)."""

from __future__ import annotations

import json
import lzma
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hybridstate.quality import tasks

HERE = Path(__file__).parent / "data"
TASK_ODDS = {"recall": 0.36, "registers": 0.1, "latest": 0.28, "counts": 0.1, "tracking": 0.16}
LANGUAGE_ODDS = {"prose": 0.8, "code": 0.12, "math": 0.08}
LANGUAGE, ANSWER, OTHER = 1, 2, 0  # codes of target bytes
Bytes = NDArray[np.uint8]


def held_out() -> Bytes:
    """Return the held-out prose (Bleak House, CC0), which is never trained on."""
    return np.frombuffer(lzma.decompress((HERE / "prose_heldout.txt.xz").read_bytes()), np.uint8)


def corpora(limit: int = 40_000_000) -> dict[str, Bytes]:
    """Return the language corpora as byte arrays: CC0 prose, PSF library source, MIT problem texts."""
    prose = lzma.decompress((HERE / "prose_train.txt.xz").read_bytes())
    library = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "dist-packages"}
    files = [
        p for p in sorted(library.rglob("*.py")) if not skipped & set(p.relative_to(library).parts)
    ]
    code = b"\n".join(p.read_bytes() for p in files)
    problems: list[str] = []
    for line in lzma.decompress((HERE / "gsm8k_train.jsonl.xz").read_bytes()).decode().splitlines():
        row = json.loads(line)
        problems.append(f"Question: {row['question']}\nAnswer: {row['answer']}\n")
    for line in (
        lzma.decompress((HERE / "math_train_problems.jsonl.xz").read_bytes()).decode().splitlines()
    ):
        row = json.loads(line)
        problems.append(f"Question: {row['problem']}\nAnswer: {row['answer']}\n")
    texts = {"prose": prose, "code": code, "math": "\n".join(problems).encode()}
    return {name: np.frombuffer(text[:limit], np.uint8) for name, text in texts.items()}


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of the curriculum: ``rows`` sequences of ``length`` tokens a step, ``share`` of all steps."""

    rows: int
    length: int
    share: float


def curriculum(tokens: int, scale: int = 1) -> tuple[Stage, ...]:
    """Return the length curriculum at ``tokens`` tokens a step; ``scale`` shortens it for smoke runs."""
    plan = ((256, 0.08), (1024, 0.32), (2048, 0.3), (8192, 0.3))
    return tuple(Stage(max(4, tokens // n), n // scale, share) for n, share in plan)


@dataclass(slots=True)
class Batches:
    """Batches by index. ``task_share`` of the rows are tasks, most of them in the half with limited attention."""

    seed: int
    corpora: dict[str, Bytes]
    stages: tuple[Stage, ...]
    task_share: float = 0.5

    def batch(self, stage: int, step: int) -> tuple[Bytes, Bytes, NDArray[np.int64]]:
        """Return token ids and target codes [rows, length + 1] and the windows [rows // 2] of ``step``."""
        rng = np.random.default_rng([self.seed, step])
        rows, length = self.stages[stage].rows, self.stages[stage].length
        near = rows // 2
        total, quota = rows * self.task_share, near * min(1.0, 1.5 * self.task_share)
        near_tasks = min(near, int(quota) + int(rng.random() < quota % 1))
        far_tasks = max(0, int(total) + int(rng.random() < total % 1) - near_tasks)
        ids = np.empty((rows, length + 1), np.uint8)
        codes = np.zeros((rows, length + 1), np.uint8)
        for row in range(rows):
            is_task = row < near_tasks if row < near else row - near < far_tasks
            if is_task:
                name = str(rng.choice(list(TASK_ODDS), p=list(TASK_ODDS.values())))
                text, mask = tasks.document(name, tokens=length + 1, rng=rng, fill=self.fill)
                ids[row] = np.frombuffer(text, np.uint8)
                codes[row] = mask * ANSWER
            else:
                name = str(rng.choice(list(LANGUAGE_ODDS), p=list(LANGUAGE_ODDS.values())))
                ids[row] = self.crop(rng, name, length + 1)
                codes[row] = LANGUAGE
        return ids, codes, rng.integers(64, 129, near)

    def crop(self, rng: np.random.Generator, name: str, length: int) -> Bytes:
        """Return a random stretch of corpus ``name``."""
        text = self.corpora[name]
        start = int(rng.integers(0, len(text) - length))
        return text[start : start + length]

    def fill(self, rng: np.random.Generator, length: int) -> bytes:
        """Return a stretch of training prose, for task documents."""
        return self.crop(rng, "prose", length).tobytes()
