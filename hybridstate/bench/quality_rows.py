"""What `bench quality` reports of one block: accuracy per arm, paired differences, distances, hit rates."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hybridstate.quality.questions import Block
from hybridstate.quality.replay import ReuseArm
from hybridstate.quality.reuse import divergence, mean_and_error, paired_interval
from hybridstate.trajectories.model import LoadedModel

F64 = NDArray[np.float64]
BOOTSTRAP_SEED = 20_261_130


class Rows:
    """Results of one block, arm by arm; `dense` has to come first.

    Args:
        boundary: where the cached prefix ends.
        rounds: measured replays.
    """

    def __init__(self, loaded: LoadedModel, block: Block, boundary: str, rounds: int) -> None:
        self.loaded, self.block, self.boundary, self.rounds = loaded, block, boundary, rounds
        self.scores: dict[str, F64] = {}
        self.arms: dict[str, dict[str, Any]] = {}
        self.replies: list[str] = []
        self._tokens: NDArray[np.int64] | None = None
        self._first: torch.Tensor | None = None

    def add(
        self, arm: ReuseArm, tokens: NDArray[np.int64], first: torch.Tensor, more: dict[str, Any]
    ) -> None:
        """One arm. Its `samples` are a line of scores per round, in the order of the questions.

        Args:
            tokens: replies `[R, budget]`, round by round; `[questions, budget]` where all rounds are one.
            first: log-probabilities of the first token `[R, vocabulary]`, or `[questions, vocabulary]`.
            more: bytes and hit rates.
        """
        tokens = self._ended(tokens)
        texts = self._texts(tokens)
        count = self.block.questions
        decoded = len(tokens) // count
        copies = self.rounds // decoded
        scored = [self.block.score(row % count, text) for row, text in enumerate(texts)]
        scores = np.tile(np.array(scored, np.float64).reshape(decoded, count), (copies, 1))
        tokens, first = np.tile(tokens, (copies, 1)), first.repeat(copies, 1)
        if self._tokens is None or self._first is None:
            assert arm.name == "dense", "the dense arm comes first"
            self._tokens, self._first = tokens, first.clone()  # not a view of all arms
            self.replies = texts[:count]
        kl = divergence(self._first[:, None], first[:, None])
        by_question = scores.mean(0)
        accuracy, error = mean_and_error(by_question)
        difference = by_question - self.scores.get("dense", by_question)
        interval = paired_interval(difference, BOOTSTRAP_SEED) if difference.any() else (0.0, 0.0)
        rounds = tokens.reshape(self.rounds, count, -1)
        self.scores[arm.name] = by_question
        self.arms[arm.name] = {
            "accuracy": accuracy,
            "accuracy_se": error,
            "difference": float(difference.mean()),
            "difference_interval_95": None if interval is None else list(interval),
            "same_reply": float((tokens == self._tokens).all(1).mean()),
            "kl_first": float(kl.mean()),
            "rounds_decoded": decoded,
            "rounds_differ": int((rounds != rounds[:1]).any((0, 2)).sum()),
            **more,
            "samples": [" ".join(f"{x:.6g}" for x in row) for row in scores.tolist()],
        }

    def to_json(self, arms: Sequence[ReuseArm]) -> dict[str, Any]:
        """The block's entry."""
        block = self.block
        hits = [a["hit"] for n, a in self.arms.items() if n != "recompute"]
        requests = sum(hit["requests"] for hit in hits)
        return {
            "task": block.task,
            "suite": "own" if block.rule == "exact" else "ruler",
            "source": block.source,
            "boundary": self.boundary,
            "tokens": block.tokens,
            "prefix_tokens": block.prefix,
            "unseen_tokens": int(block.suffix.shape[1]),
            "questions": block.questions,
            "replays": self.rounds,
            "rule": block.rule,
            "budget": block.budget,
            "chance": block.chance,
            "hit_pooled": sum(h["token_hit"] * h["requests"] for h in hits) / requests,
            "arms": self.arms,
            "random": self._random(arms),
            "dense_replies": self.replies,
            "references": [list(answers) for answers in block.references],
        }

    def _random(self, arms: Sequence[ReuseArm]) -> list[dict[str, Any]]:
        """NR against the mean of the random masks with the same counts, per cutoff."""
        found = []
        for w_max in dict.fromkeys(a.w_max for a in arms if a.seed is not None):
            names = [a.name for a in arms if a.w_max == w_max and a.seed is not None]
            if not all(name in self.scores for name in [*names, f"nr-{w_max}"]):
                continue
            masks = np.stack([self.scores[name] for name in names])
            difference = self.scores[f"nr-{w_max}"] - masks.mean(0)
            interval = paired_interval(difference, BOOTSTRAP_SEED)
            by_mask = masks.mean(1)
            found.append(
                {
                    "w_max": w_max,
                    "mean": float(by_mask.mean()),
                    "sd_over_masks": float(by_mask.std(ddof=1)) if len(names) > 1 else None,
                    "by_mask": by_mask.tolist(),
                    "nr_above": float(difference.mean()),
                    "nr_above_interval_95": None if interval is None else list(interval),
                }
            )
        return found

    def _ended(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Replies with everything after an end of text made equal to it."""
        end = getattr(self.loaded.tokenizer, "eos_token_id", None)
        if end is None:
            return tokens
        stopped = np.maximum.accumulate(tokens == end, axis=1)
        return np.where(stopped, end, tokens)

    def _texts(self, tokens: NDArray[np.int64]) -> list[str]:
        assert self.loaded.tokenizer is not None, "prompts were tokenised"
        decoded: list[str] = self.loaded.tokenizer.batch_decode(
            tokens.tolist(), skip_special_tokens=True
        )
        return decoded


def summary(blocks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean over the tasks of a suite, per boundary, length and arm; the standard error is over its questions.

    Tasks count alike; their questions are independent, so variances of the means add.
    """
    found = []
    keys = dict.fromkeys((b["suite"], b["boundary"], b["tokens"]) for b in blocks)
    for suite, boundary, tokens in keys:
        chosen = [
            b
            for b in blocks
            if (b["suite"], b["boundary"], b["tokens"]) == (suite, boundary, tokens)
        ]
        for arm in chosen[0]["arms"]:
            cells = [b["arms"][arm] for b in chosen if arm in b["arms"]]
            if len(cells) != len(chosen):
                continue
            errors = [c["accuracy_se"] for c in cells]
            squares = None if None in errors else sum(e**2 for e in errors)
            found.append(
                {
                    "suite": suite,
                    "boundary": boundary,
                    "tokens": tokens,
                    "arm": arm,
                    "tasks": len(chosen),
                    "accuracy": float(np.mean([c["accuracy"] for c in cells])),
                    "accuracy_se": None
                    if squares is None
                    else float(np.sqrt(squares) / len(cells)),
                    "difference": float(np.mean([c["difference"] for c in cells])),
                    "same_reply": float(np.mean([c["same_reply"] for c in cells])),
                    "kl_first": float(np.mean([c["kl_first"] for c in cells])),
                    "token_hit": float(np.mean([c["hit"]["token_hit"] for c in cells])),
                    "bytes": cells[0]["bytes"],
                }
            )
    return found


def loaded_share(blocks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Per arm the share of all measured requests that started from a cached state; arms without a cache left out."""
    requests: dict[str, int] = {}
    hits: dict[str, int] = {}
    for block in blocks:
        for name, arm in block["arms"].items():
            if arm["bytes"]:
                requests[name] = requests.get(name, 0) + arm["hit"]["requests"]
                hits[name] = hits.get(name, 0) + arm["hit"]["hits"]
    return {name: hits[name] / count for name, count in requests.items()}
