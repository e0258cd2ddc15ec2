"""How other packages' decode steps are called, one entry each.

A bound call takes the number of a group of slots and runs one step on it. With `read` it also returns the output
and that group's new states in the peer's own order, for the check; without, nothing but the launch is left.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor

from hybridstate.kernels.fusion import StepFusion

Step = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class PeerCall:
    """One kernel of another package.

    Attributes:
        name: shown in reports.
        distribution, module: what to install, and what must be importable.
        dtype: of the state.
        in_place: writes into the pool it read; otherwise it returns fresh states.
        value_first: states are [V, K] rather than [K, V].
        kinds, gates: of `UpdateDims.kind` and `bench.update.GATES` that it computes.
        builder: binds everything but the group: (vectors, fusion, pool, groups) to a step.
    """

    name: str
    distribution: str
    module: str
    dtype: torch.dtype
    in_place: bool
    value_first: bool
    kinds: tuple[str, ...]
    gates: tuple[str, ...]
    builder: Callable[..., Step]

    @property
    def state(self) -> str:
        """The dtype as formats are named."""
        return {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(self.dtype, "fp16")

    def fits(self, kind: str, gate: str) -> bool:
        """Whether it computes this recurrence from these inputs."""
        return kind in self.kinds and gate in self.gates

    def bind(
        self,
        vectors: tuple[Tensor, ...],
        fusion: StepFusion,
        pool: Tensor,
        groups: Sequence[Tensor],
    ) -> Step:
        """The step on these inputs and this pool."""
        return self.builder(vectors, fusion, pool, groups)


def _fla_gates(fusion: StepFusion) -> dict[str, Any]:
    """Flags of fla-core that turn raw projections into decay and strength."""
    if fusion.a_log is None:
        return {}
    return {
        "use_gate_in_kernel": True,
        "A_log": fusion.a_log,
        "dt_bias": None if fusion.dt_bias is None else fusion.dt_bias.flatten(),
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": fusion.beta_scale == 2.0,
    }


def _fla_gdn(value_first: bool) -> Callable[..., Step]:
    def build(
        vectors: tuple[Tensor, ...], fusion: StepFusion, pool: Tensor, groups: Sequence[Tensor]
    ) -> Step:
        function = import_module(
            "fla.ops.gated_delta_rule.fused_recurrent"
        ).fused_recurrent_gated_delta_rule
        q, k, v, g, beta = (x.unsqueeze(1) for x in vectors)
        size, options = len(groups[0]), _fla_gates(fusion)

        def step(group: int, *, read: bool = False) -> Any:
            with torch.no_grad():
                found = function(
                    q, k, v, g=g, beta=beta, output_final_state=True,
                    initial_state=pool[1 + group * size : 1 + (group + 1) * size],
                    use_qk_l2norm_in_kernel=True, state_v_first=value_first, **options,
                )  # fmt: skip
            return found if read else None

        return step

    return build


def _fla_kda(
    vectors: tuple[Tensor, ...], fusion: StepFusion, pool: Tensor, groups: Sequence[Tensor]
) -> Step:
    function = import_module("fla.ops.kda.fused_recurrent").fused_recurrent_kda_fwd
    q, k, v, g, beta = (x.unsqueeze(0) for x in vectors)
    ends = torch.arange(len(groups[0]) + 1, device=pool.device)
    slots = [x.int() for x in groups]
    out = torch.empty_like(v)
    options = _fla_gates(fusion) | {"lower_bound": fusion.lower_bound}

    def step(group: int, *, read: bool = False) -> Any:
        function(
            q, k, v, g, beta, initial_state=pool, scale=q.shape[-1] ** -0.5,
            output_final_state=True, inplace_final_state=True, state_v_first=True,
            cu_seqlens=ends, ssm_state_indices=slots[group], use_qk_l2norm_in_kernel=True,
            out=out, **options,
        )  # fmt: skip
        return (out[0], pool[groups[group]]) if read else None

    return step


def _packed_decode(module: str) -> Callable[..., Step]:
    """The step of SGLang and vLLM on the fused row after the convolution; GDN with the softplus gate."""

    def build(
        vectors: tuple[Tensor, ...], fusion: StepFusion, pool: Tensor, groups: Sequence[Tensor]
    ) -> Step:
        function = import_module(module).fused_recurrent_gated_delta_rule_packed_decode
        q, k, v, a, b = vectors
        if fusion.beta_scale != 1.0:
            raise ValueError("strengths above 1 are not offered")
        row = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
        out = torch.empty(len(v), 1, *v.shape[1:], dtype=v.dtype, device=v.device)
        slots = [x.int() for x in groups]

        def step(group: int, *, read: bool = False) -> Any:
            function(
                row, a, b, fusion.a_log, fusion.dt_bias, q.shape[-1] ** -0.5, pool, out,
                slots[group], use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            return (out[:, 0], pool[groups[group]]) if read else None

        return step

    return build


def _flashinfer(
    vectors: tuple[Tensor, ...], fusion: StepFusion, pool: Tensor, groups: Sequence[Tensor]
) -> Step:
    function = import_module("flashinfer.gdn_decode").gated_delta_rule_decode_pretranspose
    q, k, v, a, b = (x.unsqueeze(1) for x in vectors)
    if fusion.beta_scale != 1.0:
        raise ValueError("strengths above 1 are not offered")
    out = torch.empty_like(v)
    slots = [x.int() for x in groups]

    def step(group: int, *, read: bool = False) -> Any:
        function(
            q, k, v, None, fusion.a_log, a, fusion.dt_bias, b, scale=q.shape[-1] ** -0.5,
            output=out, use_qk_l2norm=True, initial_state=pool,
            initial_state_indices=slots[group],
        )  # fmt: skip
        return (out[:, 0], pool[groups[group]]) if read else None

    return step


_BOTH: Final = ("fused", "given")
_SGLANG: Final = "sglang.srt.layers.attention.fla.fused_recurrent"
_VLLM: Final = "vllm.model_executor.layers.fla.ops.fused_recurrent"

CALLS: Final = (
    *(
        PeerCall(
            f"fused_recurrent, {'[V, K]' if v_first else '[K, V]'}", "fla-core", "fla",
            torch.float32, False, v_first, ("gdn",), _BOTH, _fla_gdn(v_first),
        )
        for v_first in (True, False)
    ),
    *(
        PeerCall(
            "fused_recurrent on a pool", "fla-core", "fla", dtype, True, True, ("kda",), _BOTH,
            _fla_kda,
        )
        for dtype in (torch.float32, torch.bfloat16)
    ),
    *(
        PeerCall(
            "packed decode", distribution, distribution, dtype, True, True, ("gdn",), ("fused",),
            _packed_decode(module),
        )
        for distribution, module in (("sglang", _SGLANG), ("vllm", _VLLM))
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ),
    *(
        PeerCall(
            "decode, pretransposed pool", "flashinfer-python", "flashinfer", dtype, True, True,
            ("gdn",), ("fused",), _flashinfer,
        )
        for dtype in (torch.float32, torch.bfloat16)
    ),
)  # fmt: skip
"""Every peer; a call that another release changed fails and says so in its row."""
