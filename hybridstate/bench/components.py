"""Where the time of a decode step goes, and what its bytes alone would take.

One replay of the captured step is profiled, with a ring as many as an interval has, whose mean counts; every kernel
belongs to one component by its name, and what lies between kernels is a component too, so that they sum to the step.
Two names need their place: the output layer is the last matrix product of the step, and a gated product belongs to the
experts only where a mixture's pairs are ordered behind it; that of a dense feed-forward block is another kernel.

Which experts a step reads is counted where the routers' choice reaches them: a batch whose routers favour some experts
reads fewer than uniform routing would.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from hybridstate.bench.timing import kernel_times
from hybridstate.runtime.engine import DecodeEngine, DecodeRun
from hybridstate.trajectories.model import LoadedModel

COMPONENTS: Final = (
    "recurrent update",
    "convolution",
    "experts",
    "attention",
    "projections",
    "norms and routing",
    "output layer",
    "other kernels",
    "between kernels",
)
_PATTERNS: Final = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("recurrent update", r"^(packed|split|dense|ring|flush)_kernel"),
        ("convolution", r"^conv_kernel|conv_depthwise|conv1d"),
        ("experts", r"^(order|gate_up|down|combine|gated)_kernel|grouped"),
        ("attention", r"^(attention|join|append)_kernel|flash|fmha"),
        ("norms and routing", r"^(rms_norm|route)_kernel"),
        ("projections", r"nvjet|gemm|gemv|cutlass|cublas|splitK"),
    )
)
_MIXERS: Final = frozenset({"recurrent update", "convolution", "attention"})


def component(kernel: str) -> str:
    """The component of a kernel by its name."""
    return next((name for name, pattern in _PATTERNS if pattern.search(kernel)), "other kernels")


def placed(kernels: Sequence[str]) -> list[str]:
    """The component of each kernel of one step, in order of their start, by name and place."""
    found = [component(kernel) for kernel in kernels]
    products = [place for place, name in enumerate(found) if name == "projections"]
    if products:
        found[products[-1]] = "output layer"
    mixture = False
    for place in reversed(range(len(kernels))):
        if kernels[place].startswith("order_kernel"):
            mixture = True
        elif kernels[place].startswith("gated_kernel"):
            if not mixture:
                found[place] = "other kernels"
            mixture = False
        elif found[place] in _MIXERS:  # one lies before every feed-forward block
            mixture = False
    return found


def step_components(kernels: Sequence[tuple[str, float]], step: float) -> dict[str, Any]:
    """Seconds and launches of each component; they sum to `step` seconds."""
    owners = placed([name for name, _ in kernels])
    named = [(owner, seconds) for owner, (_, seconds) in zip(owners, kernels, strict=True)]
    found = {
        name: {
            "s": sum(seconds for owner, seconds in named if owner == name),
            "launches": sum(owner == name for owner, _ in named),
        }
        for name in COMPONENTS[:-1]
    }
    found["between kernels"] = {"s": step - sum(x["s"] for x in found.values()), "launches": 0}
    return found


def longest(kernels: Sequence[tuple[str, float]], count: int = 16) -> list[dict[str, Any]]:
    """The kernels that take longest, by name."""
    total: dict[str, list[float]] = {}
    for name, seconds in kernels:
        total.setdefault(name, []).append(seconds)
    ordered = sorted(total.items(), key=lambda item: -sum(item[1]))[:count]
    return [
        {"kernel": name[:100], "component": component(name), "launches": len(each), "s": sum(each)}
        for name, each in ordered
    ]


def profiled(run: DecodeRun, step: float) -> dict[str, Any] | None:
    """Components of a captured run whose step takes `step` seconds; None without a graph. The run is not advanced."""
    if run.graph is None:
        return None
    with run.undone():
        run.graph()
    every = run.engine.pool.every
    with run.undone():
        replays = [kernel_times(run.graph) for _ in range(every)]
    if not all(replays):
        return None
    each = [step_components(kernels, step) for kernels in replays]
    parts = {
        name: {
            "s": sum(parts[name]["s"] for parts in each) / every,
            "launches": sum(parts[name]["launches"] for parts in each) / every,
        }
        for name in COMPONENTS
    }
    return {"components": parts, "longest": longest(replays[0])}


class ExpertCount:
    """Distinct experts that the steps of a model use, by mixture of experts.

    Watch a step that runs, or the capture of one: its replays write their choices to the same places, so that `add`
    counts each of them without another launch inside the step.
    """

    def __init__(self, model: Any) -> None:
        self._modules = [
            module
            for module in model.modules()
            if type(module).__name__.endswith("Experts")
            and isinstance(getattr(module, "gate_up_proj", None), Tensor)
        ]
        self._chosen: list[Tensor | None] = [None] * len(self._modules)
        self._total: Tensor | None = None
        self._steps = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the last choice `[T, k]` of every mixture that runs meanwhile, in few launches or in its own code."""
        from hybridstate.kernels import experts

        places = {id(module.gate_up_proj): n for n, module in enumerate(self._modules)}
        names = ("experts_step", "experts_reference")
        originals = {name: getattr(experts, name) for name in names}

        def through(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def run(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, *rest: Any) -> Tensor:
                if id(gate_up) in places:
                    self._chosen[places[id(gate_up)]] = chosen
                return original(x, gate_up, down, chosen, *rest)

            return run

        def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            chosen = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
            self._chosen[places[id(module.gate_up_proj)]] = chosen

        handles = [
            module.register_forward_pre_hook(before, with_kwargs=True) for module in self._modules
        ]
        for name in names:
            setattr(experts, name, through(originals[name]))
        try:
            yield
        finally:
            for name in names:
                setattr(experts, name, originals[name])
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def add(self) -> None:
        """Count the step that has just run."""
        used = []
        for module, chosen in zip(self._modules, self._chosen, strict=True):
            if chosen is None:
                return
            count = len(module.gate_up_proj)
            taken = torch.zeros(count + 1, dtype=torch.int64, device=chosen.device)
            # past the last expert lie those of other ranks
            taken[chosen.reshape(-1).long().clamp(max=count)] = 1
            used.append(taken[:count].sum())
        if used:
            total = torch.stack(used)
            self._total = total if self._total is None else self._total + total
            self._steps += 1

    @property
    def per_layer(self) -> list[float] | None:
        """Distinct experts of each mixture, the mean over the counted steps; None where nothing was counted."""
        if self._total is None:
            return None
        return [count / self._steps for count in self._total.tolist()]

    @property
    def nbytes(self) -> int | None:
        """Bytes of their weights in all mixtures; None where not every mixture was counted."""
        used = self.per_layer
        if used is None:
            return None
        sizes = [
            sum(p.numel() * p.element_size() for p in module.parameters())
            / len(module.gate_up_proj)
            for module in self._modules
        ]
        return int(sum(n * size for n, size in zip(used, sizes, strict=True)) + 0.5)

    def to_json(self) -> dict[str, Any] | None:
        """Mean of a layer and total of all per step, of how many there are, over how many steps."""
        used = self.per_layer
        if used is None:
            return None
        return {
            "per_layer_mean": sum(used) / len(used),
            "total": sum(used),
            "per_layer": used,
            "layers": len(used),
            "of": sum(len(module.gate_up_proj) for module in self._modules),
            "steps": self._steps,
        }


def step_bytes(
    loaded: LoadedModel,
    engine: DecodeEngine,
    batch: int,
    keys_and_values: int,
    experts: int | None = None,
) -> dict[str, int]:
    """Bytes a step moves: weights once, states read and written, keys and values read.

    Of an embedding only the batch's rows count, of experts those that were counted.

    Args:
        loaded, engine: the model and its pool.
        batch: sequences.
        keys_and_values: bytes read of them.
        experts: bytes of the experts that steps used (`ExpertCount.nbytes`); None: of those that uniform routing is
            expected to use, which is no bound: routers that favour some experts read less.
    """
    config = loaded.model.config.get_text_config(decoder=True)
    top = getattr(config, "num_experts_per_tok", getattr(config, "num_experts_per_token", 0)) or 0
    embedding = loaded.model.get_input_embeddings().weight
    tied = embedding is getattr(loaded.model.get_output_embeddings(), "weight", None)
    found = {"experts": experts or 0, "other weights": 0, "keys and values": keys_and_values}
    for name, parameter in loaded.model.named_parameters():
        size = parameter.numel() * parameter.element_size()
        if parameter is embedding and not tied:
            found["other weights"] += size * batch // len(parameter)
        elif ".experts." in name and top:
            used = 1 - (1 - top / parameter.shape[0]) ** batch
            found["experts"] += int(used * size) if experts is None else 0
        else:
            found["other weights"] += size
    found["states"] = batch * engine.pool.step_bytes
    found["windows"] = 2 * batch * engine.pool.conv_bytes
    return found


def memory_bandwidth(device: torch.device) -> float:
    """Bytes per second of an in-place pass over 2 GiB, the best of several."""
    from hybridstate.bench.timing import measure_launches

    memory = torch.ones(1 << 29, device=device)
    samples = measure_launches([lambda: memory.add_(1.0)], device=device, repeat=100)
    return 2 * memory.numel() * 4 / min(samples.seconds)
