"""Linear layers cut by heads: the ranks' parts add up to the whole layer, and hold the units the placement counts."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridstate.errors import NumericError, PlanMismatch, UnsupportedModel
from hybridstate.families import ModelSpec
from hybridstate.plan.placement import place
from hybridstate.plan.select import Selection, random_selection, select
from hybridstate.runtime.exchange import rank_heads
from hybridstate.runtime.fused import cache_name, linear_step
from hybridstate.runtime.parallel import Ranks, rank_spec, shard
from hybridstate.trajectories.cache import linear_layers, new_cache, prefill
from hybridstate.trajectories.model import LoadedModel, linear_modules, load_model
from tests.families.saved import MODELS, available, save
from tests.families.test_saved_models import RUNS
from tests.tiny import FAMILIES, write_checkpoint
from tests.tolerances import relative_rms

TP = 2


def written(name: str, folder: Path) -> Path:
    """A tiny model in the released layout, or as transformers saves it."""
    if name in FAMILIES:
        return write_checkpoint(folder / name, name)
    if not available(name):
        pytest.skip(f"this transformers has no {MODELS[name].model}")
    return save(name, folder / name)


@torch.no_grad()
def outputs(loaded: LoadedModel, x: torch.Tensor) -> list[torch.Tensor]:
    """Every linear module on `x [B, T, D]`: all tokens but one together, then the last from the states they left."""
    found = []
    for module, ordinal in linear_modules(loaded.model, loaded.spec):
        past, layer = new_cache(loaded), loaded.spec.layers[ordinal]
        name = cache_name(module)
        found += [module(x[:, :-1], **{name: past}), module(x[:, -1:], **{name: past})]
        held = linear_layers(past)[ordinal]
        assert held.recurrent_states[0].shape[1] == layer.value_heads
        assert held.conv_states[0].shape[1] == layer.conv_channels
    return found


@pytest.mark.parametrize("name", [*FAMILIES, *(n for n in RUNS if n not in FAMILIES)])
def test_parts_add_up_to_the_whole_layer(name: str, tmp_path: Path) -> None:
    model = str(written(name, tmp_path))
    whole = load_model(model)
    hidden = whole.model.config.get_text_config(decoder=True).hidden_size
    x = torch.randn(2, 9, hidden, generator=torch.Generator().manual_seed(3))
    expected, summed = outputs(whole, x), []
    for rank in range(TP):
        ranks = Ranks(rank, TP)
        loaded = shard(load_model(model), ranks)
        assert loaded.spec == rank_spec(whole.spec, TP)
        assert loaded.checkpoint.spec == whole.spec
        with ranks.alone():
            summed.append(outputs(loaded, x))
    for number, output in enumerate(expected):
        found = torch.stack([part[number] for part in summed]).sum(0)
        assert relative_rms(found, output) < 1e-5
        assert relative_rms(summed[0][number], output) > 0.1


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_few_launches_are_tried_on_a_part(family: str, tmp_path: Path) -> None:
    """The trial compares the module's part with the step's: neither is summed then."""
    ranks = Ranks(1, TP)
    loaded = shard(load_model(str(written(family, tmp_path))), ranks)
    with ranks.alone():
        for module, ordinal in linear_modules(loaded.model, loaded.spec):
            assert linear_step(loaded, module, loaded.spec.layers[ordinal]) is not None


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_a_rank_has_the_heads_that_the_placement_counts(family: str, tmp_path: Path) -> None:
    spec: ModelSpec = load_model(str(written(family, tmp_path))).spec
    masks = [np.ones(spec.decay_shape(layer), bool) for layer in spec.layers]
    chosen = random_selection(_selection(masks), 5)
    placement = place(spec, chosen, tp=TP, mode="storage")
    for rank in range(TP):
        ranks = Ranks(rank, TP)
        heads = rank_heads(spec, placement, rank)
        for layer, owned in zip(spec.layers, heads, strict=True):
            assert tuple(ranks.own(np.arange(layer.value_heads))) == owned
        kept = sum(int(ranks.own(mask).sum()) for mask in chosen.retained)
        assert kept == placement.compute_units[rank]


def _selection(masks: list[np.ndarray]) -> Selection:
    generator = np.random.Generator(np.random.PCG64(2))
    return select([np.where(generator.random(m.shape) < 0.4, 1000.0, 1.0) for m in masks], 64)


def test_a_layer_that_is_not_summed_is_found(tmp_path: Path) -> None:
    """Whatever replaces a layer's code has to leave the hook behind it."""
    ranks = Ranks(0, TP)
    loaded = shard(load_model(str(written("kimi_linear", tmp_path))), ranks)
    tokens = torch.tensor([[5, 6, 7]])
    with ranks.alone():
        prefill(loaded, tokens)
        module, _ = linear_modules(loaded.model, loaded.spec)[2]
        module._forward_hooks.popitem()
        with pytest.raises(NumericError, match="2 of 3 linear layers were summed"):
            prefill(loaded, tokens)


def test_ranks_that_do_not_divide_the_heads_are_refused(tmp_path: Path) -> None:
    loaded = load_model(str(written("qwen3_5", tmp_path)))
    with pytest.raises(PlanMismatch, match="--tp 3 does not divide"):
        shard(loaded, Ranks(0, 3))


def test_an_unknown_weight_is_refused(tmp_path: Path) -> None:
    loaded = load_model(str(written("qwen3_5", tmp_path)))
    module, _ = linear_modules(loaded.model, loaded.spec)[1]
    module.register_parameter("new", torch.nn.Parameter(torch.zeros(4), requires_grad=False))
    with pytest.raises(UnsupportedModel, match="block 1: nothing is known about the heads of new"):
        shard(loaded, Ranks(0, TP))


def _meet(rank: int, folder: str) -> None:
    """Ranks whose readings differ: 1, 2, 4 ... on rank 0, 1, 3, 9 ... on rank 1."""
    ranks = Ranks.join(rank, 2, torch.device("cpu"), Path(folder) / "meeting")
    ticks = (float((2 + rank) ** n) for n in range(99))
    clock = ranks.together(lambda: next(ticks))
    times = np.array([rank, 1.0 - rank, 0.5])
    found = {
        "clock": [clock(), clock()],
        "fewest": ranks.fewest(5 - rank),
        "slowest": ranks.slowest(times).tolist(),
        "own": ranks.own(np.arange(6)).tolist(),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    ranks.leave()


def test_ranks_read_one_clock(tmp_path: Path) -> None:
    """Rank 1 is slower: 3 - 1, then 27 - 9 seconds; what passes while ranks wait is not counted."""
    torch.multiprocessing.spawn(_meet, args=(str(tmp_path),), nprocs=2)
    found = [json.loads((tmp_path / f"{rank}.json").read_text("utf-8")) for rank in range(2)]
    assert [f.pop("own") for f in found] == [[0, 1, 2], [3, 4, 5]]
    expected = {"clock": [2.0, 20.0], "fewest": 4, "slowest": [1.0, 1.0, 0.5]}
    assert found == [expected, expected]


def test_a_single_rank_asks_nobody() -> None:
    ranks = Ranks()
    assert ranks.slowest(np.array([2.0])).tolist() == [2.0]
    assert ranks.fewest(3) == 3
    assert ranks.together(float)() == 0.0
    ranks.agree("no digest", "anything")
    ranks.leave()
