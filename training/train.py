"""Train one embedded model and evaluate it: the whole recipe, seeded."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training import data, optimiser, recurrence, release

VALUES = ("language", "answers", "accuracy")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Every choice of one training run. ``steps`` fixes its length; ``seconds`` is only a guard.

    With ``steps`` 0 the schedule follows the clock for ``seconds`` instead (for trying recipes).
    """

    kind: str
    optimiser: str = "adamw"
    lr: float = 3e-3
    seed: int = 20
    steps: int = 0
    seconds: float = 238.0
    tokens: int = 32_768
    answer_weight: float = 5.0
    task_share: float = 0.625
    decay_rate: float = 3.0
    workers: int = 14
    smoke: bool = False
    save_every: float = 60.0


@dataclass(slots=True)
class Run:
    """What a training run leaves: the model, its initial decay values, the log and the pace."""

    model: nn.Module
    initial: dict[str, np.ndarray[Any, Any]]
    log: list[dict[str, float]] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0
    warm_up_seconds: float = 0.0
    steps: int = 0
    tokens: int = 0


def initialise(model: nn.Module, seed: int) -> None:
    """Draw the initial weights: fan-in normal matrices, ``exp(A_log)`` in 1-16, dt log-uniform in 1e-4..1e-1."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(parameter: Tensor, low: float, high: float) -> Tensor:
        return torch.rand(parameter.shape, generator=generator) * (high - low) + low

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(uniform(parameter, 1, 16).log())
            elif name.endswith("dt_bias"):
                dt = uniform(parameter, math.log(1e-4), math.log(1e-1)).exp()
                parameter.copy_(dt + torch.log(-torch.expm1(-dt)))
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
            elif parameter.dim() == 3:
                parameter.copy_(uniform(parameter, -0.5, 0.5))
            elif parameter.dim() == 2:
                scale = parameter.shape[1] ** -0.5
                if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
                    scale *= 0.25
                elif name.endswith(("in_proj_a.weight", "f_b_proj.weight")):
                    scale *= 0.3
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def decay_values(model: nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    """Return copies of every ``A_log`` and ``dt_bias`` by parameter name."""
    named = model.named_parameters()
    return {
        n: p.detach().float().cpu().numpy().copy() for n, p in named if n.endswith(optimiser.DECAY)
    }


def losses(model: nn.Module, ids: Tensor, codes: Tensor) -> Tensor:
    """Return mean language loss, mean answer loss (nats per byte) and answer-byte accuracy, stacked [3]."""
    inputs, targets, kinds = ids[:, :-1].long(), ids[:, 1:].long(), codes[:, 1:]
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda, cache_enabled=False):
        logits = model(input_ids=inputs, use_cache=False).logits
    flat = logits.float().flatten(0, 1)
    loss = F.cross_entropy(flat, targets.flatten(), reduction="none")
    language = (kinds == data.LANGUAGE).flatten().float()
    answer = (kinds == data.ANSWER).flatten().float()
    right = (flat.detach().argmax(-1) == targets.flatten()).float()
    answers = answer.sum().clamp_min(1.0)
    parts = (loss * language).sum() / language.sum().clamp_min(1.0), (loss * answer).sum() / answers
    return torch.stack((*parts, (right * answer).sum() / answers))


def rate(progress: float) -> float:
    """Return the learning-rate factor: 2 % warm-up, then a cosine to 4 %."""
    if progress < 0.02:
        return max(progress, 0.0005) / 0.02
    return 0.04 + 0.96 * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - 0.02) / 0.98)))


class Stepper:
    """One optimisation step on fixed-shape buffers, replayed as a CUDA graph after two plain steps."""

    def __init__(
        self,
        model: nn.Module,
        optimisers: list[Any],
        answer_weight: float,
        shape: tuple[int, int],
        device: torch.device,
    ) -> None:
        self.model, self.optimisers, self.answer_weight = model, optimisers, answer_weight
        self.ids = torch.zeros(shape[0], shape[1] + 1, dtype=torch.uint8, device=device)
        self.codes = torch.ones_like(self.ids)
        self.windows = torch.full((shape[0] // 2,), 96, device=device)
        self.totals = torch.zeros(3, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.count = 0
        self.graphs = device.type == "cuda" and not os.environ.get("TRAINING_WITHOUT_GRAPHS")
        recurrence.set_windows(model, self.windows)

    def backward(self) -> None:
        """Run forward and backward on the buffers and add the three values to ``totals``."""
        values = losses(self.model, self.ids, self.codes)
        (values[0] + self.answer_weight * values[1]).backward()
        self.totals += values.detach()

    def _all(self) -> None:
        self.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for each in self.optimisers:
            each.step()

    def clear(self) -> None:
        """Drop the gradients."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def step(self, batch: tuple[Tensor, Tensor, Tensor]) -> None:
        """Load ``batch`` into the buffers and take one step."""
        for buffer, value in zip((self.ids, self.codes, self.windows), batch, strict=True):
            buffer.copy_(value, non_blocking=True)
        self.count += 1
        if self.graph is not None:
            self.graph.replay()
            return
        self.clear()
        if not self.graphs or self.count < 3:
            stream = torch.cuda.Stream() if self.ids.is_cuda else None
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                if stream is not None:
                    stream.wait_stream(torch.cuda.default_stream())
                self._all()
            if stream is not None:
                torch.cuda.default_stream().wait_stream(stream)
            return
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._all()
        self.graph = graph
        graph.replay()


def _unchanged(batch: Any) -> Any:
    return batch


def _loader(
    batches: data.Batches, stage: int, first: int, last: int, workers: int
) -> Iterator[Any]:
    """Yield the batches of steps ``first`` to ``last - 1`` in order, made by ``workers`` processes.

    Arrays travel through pipes: tensors would travel as file descriptors, which fails now and then when
    several trainings start at once.
    """

    class Indexed(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return last - first

        def __getitem__(self, index: int) -> Any:
            return batches.batch(stage, first + index)

    options: dict[str, Any] = {}
    if workers:
        options = {"prefetch_factor": 6, "multiprocessing_context": "fork"}
    loader = torch.utils.data.DataLoader(
        Indexed(),
        batch_size=None,
        shuffle=False,
        num_workers=workers,
        collate_fn=_unchanged,
        **options,
    )
    for batch in loader:
        yield tuple(torch.from_numpy(x) for x in batch)


def train(
    recipe: Recipe, device: torch.device, save: Path | None, report: Callable[[str], None]
) -> Run:
    """Train by ``recipe`` and return the run; ``save`` receives the weights every minute."""
    torch.manual_seed(recipe.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    model = release.build(recipe.kind, smoke=recipe.smoke)
    initialise(model, recipe.seed)
    run = Run(model, decay_values(model))
    model.to(device).train()
    from transformers import AttentionInterface

    AttentionInterface.register("windowed", recurrence.local_attention)
    model.config._attn_implementation = "windowed"  # type: ignore[union-attr]
    stages = data.curriculum(recipe.tokens, 8 if recipe.smoke else 1)
    batches = data.Batches(recipe.seed, data.corpora(), stages, recipe.task_share)
    optimisers, rates = optimiser.build(
        model, recipe.optimiser, recipe.lr, device, recipe.decay_rate
    )
    with recurrence.installed(model, recipe.kind, device):
        began = time.perf_counter()
        if device.type == "cuda":
            for stage in stages:
                stepper = Stepper(model, optimisers, 1.0, (stage.rows, stage.length), device)
                stepper.backward()
                stepper.clear()
            torch.cuda.synchronize()
        run.warm_up_seconds = time.perf_counter() - began
        report(f"{recipe.kind} {recipe.optimiser}: kernels ready after {run.warm_up_seconds:.1f} s")
        _loop(recipe, run, stages, batches, optimisers, rates, device, save, report)
    model.config._attn_implementation = "sdpa"  # type: ignore[union-attr]
    return run


def _loop(
    recipe: Recipe,
    run: Run,
    stages: tuple[data.Stage, ...],
    batches: data.Batches,
    optimisers: list[Any],
    rates: list[tuple[Tensor, float]],
    device: torch.device,
    save: Path | None,
    report: Callable[[str], None],
) -> None:
    began = saved = time.perf_counter()
    bounds = np.cumsum([s.share for s in stages])

    def progress() -> float:
        if recipe.steps:
            return run.steps / recipe.steps
        return (time.perf_counter() - began) / recipe.seconds

    for index, stage in enumerate(stages):
        last = round(recipe.steps * bounds[index]) if recipe.steps else run.steps + 100_000
        stepper = Stepper(
            run.model, optimisers, recipe.answer_weight, (stage.rows, stage.length), device
        )
        loader = _loader(batches, index, run.steps, last, recipe.workers)
        start, first, since = time.perf_counter(), run.steps, run.steps
        for batch in loader:
            now = progress()
            over = time.perf_counter() - began > recipe.seconds
            if over or (not recipe.steps and now > bounds[index]):
                break
            for tensor, factor in rates:
                tensor.fill_(recipe.lr * factor * rate(now))
            stepper.step(batch)
            run.steps += 1
            run.tokens += stage.rows * stage.length
            if run.steps - since >= 100 or run.steps == last:
                mean = (stepper.totals / (run.steps - since)).tolist()
                stepper.totals.zero_()
                since = run.steps
                elapsed = time.perf_counter() - began
                row = dict(
                    zip(
                        VALUES, (mean[0] / math.log(2), mean[1] / math.log(2), mean[2]), strict=True
                    )
                )
                run.log.append(
                    {"step": run.steps, "seconds": elapsed, "length": stage.length, **row}
                )
                if len(run.log) % 5 == 1:
                    report(
                        f"{recipe.kind} {recipe.optimiser} {run.steps:5d} {elapsed:6.1f}s T={stage.length:5d} "
                        f"language {row['language']:.3f} answers {row['answers']:.3f} bits, right {row['accuracy']:.3f}"
                    )
                if save is not None and time.perf_counter() - saved > recipe.save_every:
                    saved = time.perf_counter()
                    from safetensors.torch import save_file

                    save_file(
                        release.released(run.model, recipe.kind), save, metadata={"format": "pt"}
                    )
        del loader
        if device.type == "cuda":
            torch.cuda.synchronize()
        took = time.perf_counter() - start
        steps = run.steps - first
        pace = {"length": stage.length, "rows": stage.rows, "steps": steps, "seconds": took}
        run.stages.append(
            pace | {"tokens_per_second": steps * stage.rows * stage.length / max(took, 1e-9)}
        )
        report(f"{recipe.kind} {recipe.optimiser} stage {run.stages[-1]}")
        stepper.clear()
    run.seconds = time.perf_counter() - began


def summary(recipe: Recipe, run: Run) -> dict[str, Any]:
    """Return what a reader needs to judge the run: recipe, pace, and the loss curve."""
    return {
        "recipe": asdict(recipe),
        "seconds": run.seconds,
        "warm_up_seconds": run.warm_up_seconds,
        "steps": run.steps,
        "tokens": run.tokens,
        "stages": run.stages,
        "log": run.log,
    }
