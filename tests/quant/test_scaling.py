"""Value maps: twins in float64, J of the chosen candidate, exact round trips."""

import numpy as np
import pytest
import torch

from hybridstate.quant.arms import Arm, ValueMap
from hybridstate.quant.formats import FORMATS
from hybridstate.quant.risk import Place, equal_weights, objective
from hybridstate.quant.scaling import (
    CANDIDATES,
    Anchors,
    Table,
    choose,
    chosen_map,
    table,
    value_maps,
    value_rms,
)
from tests.quant.test_formats import int8_by_hand

CPU = torch.device("cpu")
K, V = 6, 40


def anchors(seed: int, *, heads: int = 4, kda: bool = True) -> Anchors:
    """States whose value dimensions differ by orders of magnitude, d_k != d_v, a short last group."""
    rng = np.random.default_rng(seed)
    spread = np.exp(2 * np.random.default_rng(99).normal(size=(1, heads, 1, V)))
    rows = np.exp(np.random.default_rng(98).normal(size=(1, heads, K, 1)))
    states = (rng.normal(size=(5, heads, K, V)) * spread * rows).astype(np.float32)
    weights = 1 + 9 * rng.random((5, heads, K) if kda else (5, heads))
    places = [Place("math", 0, 0)] * 2 + [Place("code", n, 0) for n in (1, 2, 3)]
    return Anchors(torch.from_numpy(states), torch.from_numpy(weights), places)


def test_maps_follow_the_rms_and_keep_the_geometric_mean() -> None:
    fit = anchors(0)
    shares = equal_weights(fit.places)
    squares = (fit.states.double().numpy() ** 2).mean(2)
    expected = np.sqrt(np.tensordot(shares, squares, 1))
    rms = value_rms(fit)
    np.testing.assert_allclose(rms, expected, rtol=1e-12)
    maps = value_maps(rms)
    assert len(maps) == len(CANDIDATES)
    for (power, reorder), found in zip(CANDIDATES, maps, strict=True):
        relative = expected / np.exp(np.log(expected).mean(1, keepdims=True))
        np.testing.assert_allclose(found.scale.numpy(), relative**power, rtol=1e-6)
        np.testing.assert_allclose(
            np.log(found.scale.numpy().astype(np.float64)).mean(1), 0, atol=1e-6
        )
        assert (found.order.sort(1).values == torch.arange(V)).all()
        after = np.take_along_axis(expected / found.scale.numpy(), found.order.numpy(), 1)
        assert (np.diff(after, axis=1) >= -1e-6 * after[:, 1:]).all() or not reorder
        assert reorder or (found.order == torch.arange(V)).all()


def test_dead_value_dimensions_and_heads_of_zeros_stay_finite() -> None:
    rms = np.array([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    for found in value_maps(rms):
        assert torch.isfinite(found.scale).all()
        assert (found.scale > 0).all()
        assert (found.scale[1] == 1).all()


def test_a_map_of_powers_of_two_is_undone_exactly() -> None:
    state = torch.randn(2, 3, K, V, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    scale = 2.0 ** torch.randint(-3, 4, (3, V), generator=generator)
    order = torch.stack([torch.randperm(V, generator=generator) for _ in range(3)])
    values = ValueMap(scale, order)
    stored = values.stored(state)
    assert stored[1, 2, 3, 5] == state[1, 2, 3, order[2, 5]] / scale[2, order[2, 5]]
    assert torch.equal(values.original(stored), state)
    assert torch.equal(Arm("x", FORMATS["fp32"], values=(values,)).reconstruct(state, 0), state)


def arm_by_hand(state, scale, order, protected):  # type: ignore[no-untyped-def]
    """One state `[H, K, V]` stored scaled, ordered and mixed, back in the model's coordinates."""
    out = np.empty(state.shape)
    for h in range(state.shape[0]):
        inside = (state[h] / scale[h])[:, order[h]]
        low, high = int8_by_hand(inside), inside.astype(np.float16).astype(np.float64)
        rows = np.where(np.isin(np.arange(K), protected[h])[:, None], high, low)
        out[h][:, order[h]] = rows
        out[h] *= scale[h]
    return out


@pytest.mark.parametrize("kda", [False, True])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("shared", [False, True])
def test_the_chosen_candidate_has_the_least_objective_of_its_channels(
    kda: bool, key_heads: int, shared: bool
) -> None:
    fit, tune = anchors(0, kda=kda), anchors(1, kda=kda)
    maps = value_maps(value_rms(fit))
    found = table(fit, tune, FORMATS["int8-step"], maps, device=CPU)
    k_hi = 2
    made = choose(found, found.risk, k_hi, key_heads, shared=shared)
    shares = equal_weights(tune.places)

    def by_hand(h: int, c: int, channels: np.ndarray) -> float:
        total = 0.0
        for n, share in enumerate(shares):
            state = tune.states[n, h : h + 1].double().numpy()
            scale, order = (
                maps[c].scale[h : h + 1].double().numpy(),
                maps[c].order[h : h + 1].numpy(),
            )
            error = ((arm_by_hand(state, scale, order, channels[None]) - state) ** 2).sum(-1)[0]
            weight = tune.weights[n, h].numpy()
            total += share * float((error * weight).sum())
        return total

    for h in range(4):
        values = []
        for c in range(len(CANDIDATES)):
            own = np.sort(np.argsort(-found.risk[c, h], kind="stable")[:k_hi])
            values.append(by_hand(h, c, made.protected[h] if shared and key_heads < 4 else own))
        c = made.candidate[h]
        assert made.objective[h] == pytest.approx(values[c], rel=1e-4)
        assert values[c] <= min(values) * (1 + 1e-4)
        if not shared or key_heads == 4:
            assert made.objective[h] <= values[0]
    if shared:
        bundles = made.protected.reshape(key_heads, -1, k_hi)
        assert (bundles == bundles[:, :1]).all()
    arm = Arm(
        "damp+reorder",
        FORMATS["int8-step"],
        (torch.from_numpy(made.protected.astype(np.int64)),),
        values=(chosen_map(maps, made.candidate),),
    )
    whole = objective(tune.states, tune.weights, tune.places, arm, 0)
    assert whole == pytest.approx(made.objective.sum(), rel=1e-6)


def test_scaling_helps_where_value_dimensions_differ() -> None:
    fit, tune = anchors(0), anchors(1)
    found = table(fit, tune, FORMATS["int8-step"], value_maps(value_rms(fit)), device=CPU)
    made = choose(found, found.risk, 0, 4, shared=True)
    assert made.protected.shape == (4, 0)
    assert (made.candidate > 0).all()
    assert made.objective.sum() < 0.3 * found.low[0].sum()


def test_equal_objectives_keep_the_model_as_it_is() -> None:
    zeros = np.zeros((len(CANDIDATES), 2, K))
    made = choose(Table(zeros, zeros, zeros, zeros), zeros, 2, 1, shared=True)
    assert (made.candidate == 0).all()
    assert made.protected.tolist() == [[0, 1], [0, 1]]
