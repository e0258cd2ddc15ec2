"""A module whose trial fails by an exception keeps its own code, and the error is named."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridstate.kernels import dispatch
from hybridstate.kernels.dispatch import brief
from hybridstate.runtime import fused
from hybridstate.runtime.dense import dense_step
from hybridstate.runtime.step import StepModules
from hybridstate.trajectories import launches
from hybridstate.trajectories.dummy import dummy_model
from hybridstate.trajectories.launches import Refused, replacement
from tests.trajectories.test_graphs import GDN, small

triton = pytest.importorskip("triton")
if sys.platform == "linux":
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError


class MLP(torch.nn.Module):
    """A feed-forward block as transformers writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(12, 20, bias=False)
        self.up_proj = torch.nn.Linear(12, 20, bias=False)
        self.down_proj = torch.nn.Linear(20, 12, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down_proj(
            torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)
        )
        return found


class RMSNorm(torch.nn.Module):
    """A norm as transformers writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.variance_epsilon = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return x * root * self.weight


def errors() -> list[tuple[Exception, str]]:
    """What Triton and CUDA raise, and the line that names it."""
    inner = CompilationError("def f():\n  a = b", None, "initial value for `old` differs")
    outer = CompilationError("def g():\n  f()", None, None)
    outer.__cause__ = inner
    return [
        (inner, "CompilationError: initial value for `old` differs"),
        (outer, "CompilationError: initial value for `old` differs"),
        (
            OutOfResources(262144, 232448, "shared memory"),
            "OutOfResources: out of resource: shared memory, Required: 262144",
        ),
        (PTXASError("Internal error"), "PTXASError: PTXAS error: Internal error"),
        (RuntimeError("CUDA error: no kernel\nTry again"), "RuntimeError: CUDA error: no kernel"),
        (AssertionError(), "AssertionError"),
    ]


@pytest.mark.parametrize("place", range(6))
def test_a_kernel_that_raises_leaves_the_module_as_it_is(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybridstate.kernels import norms

    error, text = errors()[place]

    def fails(*_args: Any, **_kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    monkeypatch.setattr(norms, "gated", fails)
    monkeypatch.setattr(norms, "rms_norm", fails)
    refused = Refused()
    assert dense_step(MLP(), refused) is None
    assert dense_step(MLP(), refused) is None
    assert replacement(RMSNorm(), refused) == ("norms", None)
    assert [reason.partition(": ")[0] for reason in refused.reasons] == ["MLP", "RMSNorm"]
    for reason in refused.reasons:
        assert reason.partition(": ")[2].startswith(text)
        assert "\n" not in reason
    assert dense_step(MLP()) is None  # without a list too
    assert brief(error).startswith(text)


def test_an_engine_says_which_modules_kept_their_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kernel of prompts, mixtures and norms raises: the model's own code runs, each reason is there once."""
    from hybridstate.kernels import experts, norms, prefill_inputs, router

    loaded = dummy_model(small(tmp_path / "gdn", "Qwen3.6-35B-A3B", **GDN))

    def fails(*_args: Any, **_kwargs: Any) -> Any:
        raise OutOfResources(262144, 232448, "shared memory")

    for room, name in (
        (experts, "experts_step"),
        (norms, "rms_norm"),
        (prefill_inputs, "convolve"),
        (router, "route"),
    ):
        monkeypatch.setattr(room, name, fails)
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    monkeypatch.setattr(fused, "_ROWS", 2)
    monkeypatch.setattr(launches, "_ROUTED", 2)
    modules = StepModules(loaded)
    assert modules.replaced["linear"] == 3  # with the model's own norm
    assert modules.replaced["prompts"] == modules.replaced["mixtures"] == 0
    assert modules.replaced["norms"] == modules.replaced["routers"] == 0
    assert not modules.prompts
    kept = {reason.partition(": ")[0] for reason in modules.refused.reasons}
    assert {"Qwen3_5MoeGatedDeltaNet", "Qwen3_5MoeSparseMoeBlock", "Qwen3_5MoeRMSNorm"} <= kept
    assert len(set(modules.refused.reasons)) == len(modules.refused.reasons)
    assert all("OutOfResources: out of resource: shared" in x for x in modules.refused.reasons)


def test_what_a_trial_finds_different_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = dummy_model(small(tmp_path / "gdn", "Qwen3.6-35B-A3B", **GDN))
    runtime = loaded.spec.family.runtime
    assert runtime is not None
    module = getattr(loaded.model.model.layers[loaded.spec.layers[0].index], runtime.attribute)
    monkeypatch.setattr(module, "activation", "gelu")
    modules = StepModules(loaded)
    assert modules.replaced["linear"] == 2
    assert modules.refused.reasons == [f"{type(module).__name__}: another result of a step"]
