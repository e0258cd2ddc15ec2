"""The trial of `LinearStep.prompt`: whether a prompt in few launches gives what a linear module gives."""

from typing import Any, Final

import torch
from torch import Tensor

from hybridstate.families import LinearLayer
from hybridstate.runtime.fused import LinearStep, cache_name, module_width
from hybridstate.trajectories.cache import new_cache
from hybridstate.trajectories.launches import Refused, agree
from hybridstate.trajectories.model import LoadedModel

_PROMPT: Final = 40
"""Tokens of a trial: more than a chunk of the recurrence."""


@torch.no_grad()
def prompt_agrees(
    loaded: LoadedModel,
    module: Any,
    layer: LinearLayer,
    step: LinearStep,
    refused: Refused | None = None,
) -> bool:
    """Whether `LinearStep.prompt` gives what the module gives, from a state and from none; `refused` takes why not."""
    refused = Refused() if refused is None else refused
    generator = torch.Generator().manual_seed(layer.index)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(loaded.device, loaded.dtype)

    try:
        x = draw(1, _PROMPT, module_width(module))
        held = draw(1, layer.value_heads, layer.key_dim, layer.value_dim).float() / 10
        window = draw(1, layer.conv_channels, layer.conv_width - 1)
        for state in (held, None):
            past = new_cache(loaded)
            cached = past.layers[layer.index]
            if state is None:
                window = torch.zeros_like(window)
            else:
                padded = torch.nn.functional.pad(window, (1, 0))
                cached.update_conv_state(padded, conv_kernel_size=padded.shape[-1])
                cached.update_recurrent_state(state.clone())
            expected = module(x, **{cache_name(module): past})[0]
            found, after, ours = step.prompt(x[0], window[0], state)
            kept = cached.conv_states[0][0, :, 1 - layer.conv_width :]
            for name, a, b in (
                ("output", found, expected),
                ("state", ours, cached.recurrent_states[0]),
                ("window", after, kept),
            ):
                if not agree(a.flatten()[None], b.flatten()[None], dtype=loaded.dtype):
                    refused.add(module, f"another {name} of a prompt")
                    return False
    except Exception as error:  # compilers and drivers raise anything; the module runs
        refused.add(module, error)
        return False
    return True
