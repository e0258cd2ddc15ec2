"""Models with SYNTHETIC weights of real dimensions, made where they run: nothing is read but a config.

For measuring what a calibration costs at full size. Weights are random at the model's own initial scale, so
activations stay finite; decays follow what is published of trained models, so that states live as long as theirs:
log10(-g) of a token with the family's representative gate input is normal, with mean and spread fitted to the
retained shares of DASC Fig. 4. What the numbers of such a run say about quality says nothing about a trained model,
and everything made from one is labelled synthetic.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from hybridstate.checkpoint import EMBEDDED, Checkpoint
from hybridstate.errors import SourceError, UnsupportedModel
from hybridstate.families import FAMILIES, Family, LinearLayer, ModelSpec
from hybridstate.families.config import (
    block_count,
    gate_of,
    linear_layer,
    listed_blocks,
    names_of,
    text_config,
)
from hybridstate.families.published import CONFIGS, published_config
from hybridstate.provenance import sha256_json
from hybridstate.trajectories.model import (
    LoadedModel,
    linear_modules,
    quiet_loading,
    take_over,
    torch_device,
)

LABEL: Final = "synthetic weights"
CONV_SCALE: Final = 0.5
"""Standard deviation of convolution taps: the usual 0.02 would make queries, keys and values tiny."""
SAFE_SHARE: Final = 0.999
"""Largest share of the lower bound that a decay of the safe gate is given."""


@dataclass(frozen=True, slots=True)
class DecaySpread:
    """log10(-g): mean, and standard deviations between layers, heads of a layer and channels of a head."""

    mean: float
    layers: float
    heads: float
    channels: float


GDN_DECAYS: Final = DecaySpread(-1.605, 0.0, 0.938, 0.0)
"""Fitted to Qwen3-Next: medians of the retained share .975 where .969 is published."""
KDA_DECAYS: Final = DecaySpread(-0.153, 0.0, 0.56, 0.18)
"""Fitted to Kimi-Linear, whose channels differ mostly between heads."""
SAFE_DECAYS: Final = DecaySpread(-1.221, 0.23, 0.64, 0.73)
"""Fitted to Kimi-K3, whose channels differ mostly within heads."""


class ByteTokenizer:
    """Tokens are the bytes of UTF-8 text; stands in for the real tokenizer, which no config holds."""

    all_special_ids: tuple[int, ...] = ()

    def encode(self, text: str, **_options: Any) -> list[int]:
        """Bytes of `text`."""
        return list(text.encode())


def dummy_model(
    model: str | Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    lower_bound: float | None = None,
    seed: int = 0,
) -> LoadedModel:
    """A model of the given dimensions with synthetic weights, created on the device.

    Args:
        model: a folder with `config.json`, or the name of a published config (`families.published`).
        device, dtype, lower_bound: as for `load_model`.
        seed: of weights and decays.

    Raises:
        SourceError: there is no config, or it lacks a size.
        UnsupportedModel: transformers cannot run this architecture.
    """
    transformers: Any = import_module("transformers")
    checkpoint = dummy_checkpoint(model, lower_bound=lower_bound, seed=seed)
    config, spec = checkpoint.config, checkpoint.spec
    target = torch_device(device)
    if dtype is None:
        dtype = torch.float32 if target.type == "cpu" else torch.bfloat16
    devices = [target] if target.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), quiet_loading(), torch.no_grad():
        torch.manual_seed(seed)
        with target:
            built = _build(transformers, config, spec, dtype)
        for module, ordinal in linear_modules(built, spec):
            _scale_conv(module)
            values = draw_decays(spec, spec.layers[ordinal], seed)
            for leaf, drawn in zip((spec.family.a_log, spec.family.dt_bias), values, strict=True):
                _set(module, leaf.rsplit(".", 1)[-1], drawn)
    return take_over(built, checkpoint, ByteTokenizer(), target, dtype)


def dummy_spec(config: Mapping[str, Any], *, lower_bound: float | None = None) -> ModelSpec:
    """What `families.detect` finds out from tensors, from a config alone.

    Raises:
        SourceError, UnsupportedModel, UsageError: see `families.detect`.
    """
    text = text_config(config)
    family = _family(config, text)
    blocks = block_count(text)
    listed = None if blocks is None else listed_blocks(family, text, blocks)
    if blocks is None or listed is None:
        raise SourceError("config.json does not say which of how many layers are linear")
    gate, bound = gate_of(family, text, lower_bound)
    attribute = "" if family.runtime is None else family.runtime.attribute
    layers = tuple(
        linear_layer(family, text, index, ordinal, f"model.layers.{index}.{attribute}.")
        for ordinal, index in enumerate(sorted(listed[1]))
    )
    return ModelSpec(family, gate, bound, layers, blocks)


def draw_decays(
    spec: ModelSpec, layer: LinearLayer, seed: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A_log `[H]` and dt_bias `[H]` or `[H, K]` whose decays at the gate input a_s follow the published spread.

    A_log is 0, so that dt_bias alone sets the decay: softplus(a_s + dt_bias), or the safe gate's sigmoid, is
    inverted.
    """
    spread = GDN_DECAYS
    if spec.unit == "channel":
        spread = SAFE_DECAYS if spec.gate == "safe" else KDA_DECAYS
    generator = np.random.Generator(np.random.PCG64([seed, layer.ordinal]))
    heads, units = layer.value_heads, spec.decay_shape(layer)
    log_rate = np.full(units, spread.mean + spread.layers * generator.standard_normal())
    between = spread.heads * generator.standard_normal(heads)
    log_rate += between.reshape(heads, *[1] * (len(units) - 1))
    if len(units) > 1:
        log_rate += spread.channels * generator.standard_normal(units)
    rate = 10.0**log_rate
    if spec.lower_bound is None:
        before = rate + np.log(-np.expm1(-rate))  # inverse of softplus
    else:
        share = np.minimum(rate / -spec.lower_bound, SAFE_SHARE)
        before = np.log(share) - np.log1p(-share)
    bias = before - spec.default_gate_input
    return np.zeros(heads, np.float32), bias.astype(np.float32)


def _config(model: str | Path) -> tuple[str, dict[str, Any]]:
    """Name and config of a folder or a published model."""
    path = Path(model).expanduser()
    if path.is_dir() and (path / "config.json").is_file():
        try:
            config = json.loads((path / "config.json").read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise SourceError(f"{path / 'config.json'}: {error}", file=str(path)) from error
        if not isinstance(config, dict):
            raise SourceError(f"{path / 'config.json'} is not an object", file=str(path))
        return path.resolve().name, config
    found = published_config(str(model))
    if found is None:
        hint = f"a folder with config.json, or one of {', '.join(CONFIGS)}"
        if str(model) in EMBEDDED:
            hint = "the embedded models have trained weights: leave --dummy out"
        raise SourceError(f"no config for synthetic weights at {model}", hint=hint)
    return found


def _family(config: Mapping[str, Any], text: Mapping[str, Any]) -> Family:
    """By architecture, then by model type, the root's first."""
    model_types, architectures = names_of(config, text)
    named = [f for f in FAMILIES if set(f.architectures) & set(architectures)]
    named += [f for kind in model_types for f in FAMILIES if kind in f.model_types]
    if not named or named[0].runtime is None:
        raise UnsupportedModel(
            f"model type {' / '.join(dict.fromkeys(model_types)) or '(none)'}: transformers has no class to run",
            hint="synthetic weights need an architecture that transformers runs",
            model_type=model_types,
        )
    return named[0]


def _build(
    transformers: Any, config: Mapping[str, Any], spec: ModelSpec, dtype: torch.dtype
) -> Any:
    """The text model, initialised by its own rules on the device of the context."""
    runtime = spec.family.runtime
    assert runtime is not None  # _family has refused
    built = getattr(import_module(runtime.module), runtime.causal_lm, None)
    model_type = config.get("model_type")
    if built is None or model_type not in transformers.CONFIG_MAPPING:
        raise UnsupportedModel(
            f"transformers {transformers.__version__} has no {runtime.causal_lm} for {model_type}"
        )
    values = {key: value for key, value in config.items() if key != "model_type"}
    made = transformers.CONFIG_MAPPING[model_type](**values)
    if not isinstance(made, built.config_class):
        made = made.get_text_config(decoder=True)
    return built._from_config(made, dtype=dtype)


def dummy_checkpoint(
    model: str | Path, *, lower_bound: float | None = None, seed: int = 0
) -> Checkpoint:
    """Stands for files that do not exist; its digests are of what the weights are made from.

    Raises:
        see `dummy_model`.
    """
    name, config = _config(model)
    spec = dummy_spec(config, lower_bound=lower_bound)
    made_from = sha256_json({"label": LABEL, "config": config, "seed": seed})
    checkpoint = Checkpoint(
        path=Path(name),
        name=f"{name} ({LABEL})",
        config=config,
        entries={},
        files=(),
        warnings=(f"{name} has {LABEL}: its quality says nothing about the trained model",),
        lower_bound=spec.lower_bound,
        _digests={"config": sha256_json(config), "index": made_from, "decay": made_from},
    )
    checkpoint.__dict__["spec"] = spec  # a cached property: there are no tensors to find it from
    return checkpoint


def _scale_conv(module: Any) -> None:
    for child in module.modules():
        if isinstance(child, torch.nn.Conv1d):
            child.weight.normal_(0.0, CONV_SCALE)


def _set(module: Any, leaf: str, values: NDArray[np.float32]) -> None:
    """Replace the one parameter of that name by float32 values in its shape."""
    owners = [m for m in module.modules() if leaf in dict(m.named_parameters(recurse=False))]
    if len(owners) != 1:
        raise UnsupportedModel(
            f"{type(module).__name__} has {len(owners)} parameters named {leaf}, expected one"
        )
    present = getattr(owners[0], leaf)
    whole = torch.zeros(present.numel())
    whole[: values.size] = torch.from_numpy(values.reshape(-1).copy())  # the rest is padding
    shaped = whole.reshape(present.shape).to(present.device)
    setattr(owners[0], leaf, torch.nn.Parameter(shaped, requires_grad=False))
