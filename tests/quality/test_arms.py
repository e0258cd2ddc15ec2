"""All arms on the same prefixes: the order of the stack, sharing, interventions."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hybridstate.bench.cutoffs import make_arms
from hybridstate.errors import NumericError
from hybridstate.plan.select import select
from hybridstate.quality.arms import (
    Arm,
    Outcomes,
    cached_prefix,
    run_arms,
    twins,
)
from hybridstate.quality.intervention import INTERVENTIONS, run_interventions
from hybridstate.quality.reuse import Cases, divergence, score
from hybridstate.runtime.pool import StatePool
from hybridstate.runtime.restore import Units, resume
from hybridstate.trajectories.model import LoadedModel, load_model


@pytest.fixture(scope="module", params=["tiny_gdn", "tiny_kda"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    folder: Path = request.getfixturevalue(request.param)
    return load_model(str(folder))


def cases_of(count: int = 3) -> Cases:
    generator = torch.Generator().manual_seed(4)

    def draw(length: int) -> torch.Tensor:
        return torch.randint(97, 122, (count, length), generator=generator)

    return Cases("recall", tuple(range(count)), draw(40), draw(5), draw(2), (2,) * count)


def arms_of(loaded: LoadedModel, w_max: int = 16, seeds: int = 2) -> list[Arm]:
    horizons = []
    for layer in loaded.spec.layers:
        shape = (layer.value_heads, layer.key_dim)[: 1 if loaded.spec.unit == "head" else 2]
        alternate = np.arange(int(np.prod(shape))) % 2
        horizons.append(np.where(alternate == 0, 1e6, 10.0).reshape(shape))
    return make_arms(loaded, [select(horizons, w_max)], seeds)[0]


def outcomes_of(
    loaded: LoadedModel, arms: list[Arm], cases: Cases, slots: int
) -> tuple[Outcomes, int]:
    outcomes = Outcomes()
    counted: list[int] = []
    run_arms(loaded, arms, cases, StatePool(loaded.spec, slots), outcomes, done=counted.append)
    return outcomes, sum(counted)


def test_arms_are_dense_recompute_nr_wr_and_random(loaded: LoadedModel) -> None:
    names = [arm.name for arm in arms_of(loaded)]
    assert names == ["dense", "recompute", "nr-16", "wr-16", "random-16-1234", "random-16-2027"]


def test_results_do_not_depend_on_how_arms_are_stacked(loaded: LoadedModel) -> None:
    arms, cases = arms_of(loaded), cases_of()
    (wide, done), (narrow, _) = (outcomes_of(loaded, arms, cases, slots) for slots in (64, 2))
    assert done == len(arms) * len(cases)
    for arm in arms:
        a, b = wide.get(arm.name, "recall"), narrow.get(arm.name, "recall")
        np.testing.assert_allclose(a.kl, b.kl, rtol=1e-3, atol=1e-8)
        np.testing.assert_allclose(a.bits, b.bits, rtol=1e-5)
        np.testing.assert_array_equal(a.exact, b.exact)


def test_nr_equals_zeroing_the_omitted_units_of_a_dense_state(loaded: LoadedModel) -> None:
    arms, cases = arms_of(loaded), cases_of()
    outcomes, _ = outcomes_of(loaded, arms, cases, 64)
    prefix, units = cached_prefix(loaded, cases.context, rows=3), arms[2].units
    assert units is not None
    states = [
        state * mask.view(1, *mask.shape, *[1] * (3 - mask.dim()))
        for state, mask in zip(prefix.states, units.masks, strict=True)
    ]
    dense = score(loaded, resume(loaded, prefix.kv, prefix.states, prefix.conv), cases)
    zeroed = score(loaded, resume(loaded, prefix.kv, states, prefix.conv), cases)
    expected = divergence(dense.log_probs, zeroed.log_probs)
    np.testing.assert_allclose(outcomes.get("nr-16", "recall").kl, expected, rtol=1e-3)
    assert (outcomes.get("nr-16", "recall").kl > outcomes.get("recompute", "recall").kl).all()


def test_wr_with_the_whole_prefix_in_its_window_is_dense(loaded: LoadedModel) -> None:
    arms, cases = arms_of(loaded, w_max=64, seeds=0), cases_of()
    wr = arms[3]
    exact = Arm(wr.name, "wr", wr.units, wr.checkpoint_bytes, 64, w_replay=64)
    outcomes, _ = outcomes_of(loaded, [arms[0], exact], cases, 64)
    assert outcomes.get(wr.name, "recall").kl.max() < 1e-9


def test_arms_with_nothing_to_do_run_once(loaded: LoadedModel) -> None:
    spec, dense = loaded.spec, arms_of(loaded)[0]
    every = Units.every(spec)
    copies = [
        dense,
        Arm("nr-4", "nr", every, dense.checkpoint_bytes, 4),
        Arm("wr-4", "wr", every, dense.checkpoint_bytes, 4),
    ]
    assert twins([*copies, *arms_of(loaded)[2:]]) == {"nr-4": "dense", "wr-4": "dense"}
    outcomes, done = outcomes_of(loaded, copies, cases_of(), 8)
    assert done == 9
    assert outcomes.get("wr-4", "recall").kl.tolist() == [0, 0, 0]


def test_wrong_accounting_stops_the_run(loaded: LoadedModel) -> None:
    dense = arms_of(loaded)[0]
    wrong = Arm("dense", "dense", dense.units, dense.checkpoint_bytes + 1)
    with pytest.raises(NumericError, match="arm dense: checkpoint of"):
        outcomes_of(loaded, [wrong], cases_of(), 8)


def test_dense_comes_first(loaded: LoadedModel) -> None:
    with pytest.raises(NumericError, match="first arm must be the dense"):
        outcomes_of(loaded, arms_of(loaded)[2:], cases_of(), 8)


def test_interventions_take_away_what_they_say(loaded: LoadedModel) -> None:
    outcomes = Outcomes()
    run_interventions(loaded, cases_of(), outcomes, rows=2, done=lambda _count: None)
    kl = {name: outcomes.get(name, "recall").kl for name in INTERVENTIONS}
    assert kl["nothing"].max() == 0
    assert all(kl[name].min() > 0 for name in INTERVENTIONS[1:])


def test_one_case_has_no_other_prompt(loaded: LoadedModel) -> None:
    outcomes = Outcomes()
    run_interventions(loaded, cases_of(1), outcomes, rows=2, done=lambda _count: None)
    assert not outcomes.covers("other-prompt")
    assert outcomes.covers("zero-both")


def test_an_arm_that_missed_a_case_is_not_compared(loaded: LoadedModel) -> None:
    """A last batch of one case has no other prompt, so that arm would average over other questions."""
    outcomes = Outcomes()
    for rows in ((0, 1), (2,)):
        batch = cases_of().rows(rows)
        run_interventions(loaded, batch, outcomes, rows=2, done=lambda _count: None)
    assert len(outcomes.get("nothing", "recall").exact) == 3
    assert len(outcomes.get("other-prompt", "recall").exact) == 2
    assert not outcomes.covers("other-prompt")
    assert outcomes.covers("zero-kv")
