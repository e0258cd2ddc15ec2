"""Figures of a trained model: exact match, bits per byte, need of the recurrent state, retained units."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridstate.quality import tasks
from training import data, release

ARMS = ("nothing", "zero-KV", "zero-linear", "zero-both", "another-state")
SEED = 977_000  # evaluation questions; training uses streams [seed, step]
Questions = list[tasks.Question]


def questions(task: str, tokens: int, count: int) -> Questions:
    """Return ``count`` questions of unseen seeds."""
    streams = [
        np.random.default_rng([SEED, tasks.TASKS.index(task), tokens, i]) for i in range(count)
    ]
    return [tasks.make(task, tokens=tokens, rng=rng) for rng in streams]


def _ids(texts: list[bytes], device: torch.device, multiple: int = 64) -> Tensor:
    """Stack equally long texts as token ids, padded on the right to a multiple (causal, so without effect)."""
    rows = np.stack([np.frombuffer(t, np.uint8) for t in texts]).astype(np.int64)
    short = -rows.shape[1] % multiple
    return torch.from_numpy(np.pad(rows, ((0, 0), (0, short)), constant_values=32)).to(device)


def _logits(model: nn.Module, ids: Tensor, **options: Any) -> Any:
    with torch.no_grad(), torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        return model(input_ids=ids, **options)


def _chunks(count: int, tokens: int, room: int) -> list[slice]:
    size = max(1, room // tokens)
    return [slice(i, min(i + size, count)) for i in range(0, count, size)]


def exact(
    model: nn.Module, items: Questions, device: torch.device, room: int = 400_000
) -> np.ndarray[Any, Any]:
    """Return per question whether the greedy answer is exact.

    Greedy decoding gives the true answer exactly when each true answer byte is the argmax after the true bytes
    before it, so one teacher-forced pass decides.
    """
    right = []
    for part in _chunks(len(items), len(items[0].prompt), room):
        batch = items[part]
        answer = np.stack([np.frombuffer(q.answer, np.uint8) for q in batch]).astype(np.int64)
        ids = _ids([q.prompt + q.answer[:-1] for q in batch], device)
        start = len(batch[0].prompt) - 1
        found = (
            _logits(model, ids, use_cache=False)
            .logits[:, start : start + answer.shape[1]]
            .argmax(-1)
        )
        right.append((found.cpu().numpy() == answer).all(1))
    return np.concatenate(right)


def bits_per_byte(
    model: nn.Module, text: data.Bytes, device: torch.device, window: int, count: int
) -> float:
    """Return mean bits per byte over ``count`` evenly spaced windows of held-out text, first byte excluded."""
    starts = np.linspace(0, len(text) - window - 1, count).astype(int)
    total = 0.0
    for part in _chunks(count, window, 131_072):
        rows = np.stack([text[s : s + window] for s in starts[part]]).astype(np.int64)
        ids = torch.from_numpy(rows).to(device)
        logits = _logits(model, ids, use_cache=False).logits[:, :-1].float()
        total += float(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))
    return total / (count * (window - 1)) / math.log(2)


def _disturb(cache: Any, arm: str) -> None:
    for layer in cache.layers:
        recurrent = getattr(layer, "recurrent_states", None)
        if recurrent is not None:
            state = recurrent[0]
            if arm in ("zero-linear", "zero-both"):
                state.zero_()
            elif arm == "another-state":
                state.copy_(state.roll(1, 0))
        elif arm in ("zero-KV", "zero-both"):
            layer.keys.zero_()
            layer.values.zero_()


def restored(
    model: nn.Module, contexts: list[bytes], tails: list[bytes], arm: str, device: torch.device
) -> Tensor:
    """Return logits over ``tails`` after the cache of ``contexts`` was restored and disturbed by ``arm``."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)  # type: ignore[arg-type]
    _logits(model, _ids(contexts, device, 1), past_key_values=cache, use_cache=True)
    _disturb(cache, arm)
    found = _logits(model, _ids(tails, device), past_key_values=cache, use_cache=True)
    return cast(Tensor, found.logits)


def need_of_state(
    model: nn.Module,
    sets: Mapping[tuple[str, int], Questions],
    tokens: int,
    device: torch.device,
    text: data.Bytes,
    prose_count: int = 256,
) -> dict[str, dict[str, float]]:
    """Return per arm the exact-match share of every task, and the bits per byte of prose after a filler.

    The cache is restored before the 64-token neutral filler. Prose: 1,024 held-out bytes, filler, then the next
    256 held-out bytes, which are scored from their second byte on.
    """
    table: dict[str, dict[str, float]] = {arm: {} for arm in ARMS}
    for (task, length), items in sets.items():
        if length != tokens:
            continue
        for arm in ARMS:
            right = 0
            for part in _chunks(len(items), tokens, 260_000):
                batch = items[part]
                tails = [q.filler + q.question + q.answer[:-1] for q in batch]
                logits = restored(model, [q.context for q in batch], tails, arm, device)
                start = len(batch[0].filler + batch[0].question) - 1
                answer = np.stack([np.frombuffer(q.answer, np.uint8) for q in batch]).astype(
                    np.int64
                )
                found = logits[:, start : start + answer.shape[1]].argmax(-1).cpu().numpy()
                right += int((found == answer).all(1).sum())
            table[arm][task] = right / len(items)
    count = prose_count
    starts = np.linspace(0, len(text) - 1281, count).astype(int)
    rng = np.random.default_rng(SEED)
    contexts = [text[s : s + 1024].tobytes() for s in starts]
    after = [text[s + 1024 : s + 1280].tobytes() for s in starts]
    tails = [tasks.prose(rng, 64) + t for t in after]
    for arm in ARMS:
        total = 0.0
        for part in _chunks(count, 1024, 260_000):
            logits = restored(model, contexts[part], tails[part], arm, device)[:, 64:319].float()
            target = _ids([t[1:] for t in after[part]], device, 1)
            total += float(F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"))
        table[arm]["prose_bits_per_byte"] = total / (count * 255) / math.log(2)
    return table


def horizons(values: Mapping[str, np.ndarray[Any, Any]], kind: str) -> list[np.ndarray[Any, Any]]:
    """Return ``ln(1e-3) / g`` per layer, ``g = -exp(A_log) softplus(dt_bias - 0.3)``, on the stored values."""
    out = []
    for name in (n for n in values if n.endswith("A_log")):
        a_log = values[name].astype(np.float64).reshape(-1)
        dt_bias = values[name.replace("A_log", "dt_bias")]
        if kind == "gdn":
            dt_bias = torch.from_numpy(dt_bias).bfloat16().float().numpy()
        else:
            a_log = a_log[:, None]
            dt_bias = dt_bias.reshape(len(a_log), -1)
        log_decay = -np.exp(a_log) * np.logaddexp(0.0, dt_bias.astype(np.float64) - 0.3)
        out.append(math.log(1e-3) / log_decay)
    return out


def retention(
    before: Mapping[str, np.ndarray[Any, Any]], after: Mapping[str, np.ndarray[Any, Any]], kind: str
) -> dict[str, Any]:
    """Return shares of units with a horizon above each cutoff, initial and trained, and the share that crossed."""
    old, new = horizons(before, kind), horizons(after, kind)
    table: dict[str, Any] = {}
    for cutoff in (16, 64, 128, 512):
        initial, trained = (np.concatenate([(h > cutoff).ravel() for h in hs]) for hs in (old, new))
        table[str(cutoff)] = {
            "initial": float(initial.mean()),
            "trained": float(trained.mean()),
            "crossed": float((initial != trained).mean()),
            "trained_by_layer": [float((h > cutoff).mean()) for h in new],
        }
    return table


def everything(
    model: nn.Module,
    kind: str,
    sets: Mapping[tuple[str, int], Questions],
    device: torch.device,
    windows: int = 200,
    window: int = 2048,
    prose_count: int = 256,
) -> dict[str, Any]:
    """Evaluate ``model`` after rounding it to the released file's values."""
    model.eval()
    release.round_to_release(model, kind)
    text = data.held_out()
    scores: dict[str, Any] = {}
    for (task, tokens), items in sets.items():
        scores.setdefault(task, {"chance": tasks.CHANCE[task]})[str(tokens)] = float(
            exact(model, items, device).mean()
        )
    shortest = min(tokens for _, tokens in sets)
    longest = max(tokens for _, tokens in sets)
    found: dict[str, Any] = {
        "questions": len(next(iter(sets.values()))),
        "exact_match": scores,
        "prose_bits_per_byte": bits_per_byte(model, text, device, window, windows),
        "need_of_state": {
            str(shortest): need_of_state(model, sets, shortest, device, text, prose_count)
        },
    }
    if longest > shortest:
        few = {key: items[:256] for key, items in sets.items() if key[0] in ("recall", "registers")}
        found["need_of_state"][str(longest)] = need_of_state(
            model, few, longest, device, text, prose_count
        )
    return found
