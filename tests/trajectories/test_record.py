"""Recording: weights equal Eq. 15 by hand, anchors are true states, sampling is batch-independent."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hybridstate.errors import NumericError, SourceError, UsageError
from hybridstate.trajectories.model import (
    LoadedModel,
    decode,
    load_model,
    prefill,
    recurrent_states,
    reference_decode,
    reference_prefill,
    swap,
)
from hybridstate.trajectories.prompts import Prompt, make_prompts, shipped_texts
from hybridstate.trajectories.protocol import Protocol
from hybridstate.trajectories.record import (
    Recording,
    record,
    repeated_share,
    sample,
    stop_tokens,
)
from hybridstate.trajectories.store import TrajectoryStore
from tests.tolerances import assert_within

SMALL = Protocol(
    profile="custom",
    prompts_per_split=1,
    input_tokens=24,
    new_tokens=22,
    windows=(0, 6),
    anchors=(2, 5),
    horizon=7,
)


@pytest.fixture(scope="module", params=["tiny_gdn", "tiny_kda"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return load_model(str(request.getfixturevalue(request.param)))


@pytest.fixture(scope="module")
def prompts() -> tuple[Prompt, ...]:
    return make_prompts(lambda text: list(text.encode()), shipped_texts(), SMALL, seed=0)[:3]


def test_weights_and_means_equal_the_equation_on_all_recorded_decays(
    loaded: LoadedModel, prompts: tuple[Prompt, ...]
) -> None:
    decays: list[list[np.ndarray]] = [[] for _ in loaded.spec.layers]

    def spy(ordinal, q, k, v, g, beta, initial_state):  # type: ignore[no-untyped-def]
        decays[ordinal].append(g.double().numpy().copy())
        return reference_decode(ordinal, q, k, v, g, beta, initial_state)

    recording = record(loaded, prompts, SMALL, temperature=1.0, seed=5)
    tokens = torch.from_numpy(np.stack([p.tokens for p in prompts]))
    with swap(loaded, decode=spy):
        _, cache = prefill(loaded, tokens)
        for t in range(SMALL.new_tokens):
            decode(loaded, recording.generated[:, t], cache)
    for ordinal, layer in enumerate(decays):
        g = np.stack(layer)  # [N, B, H] or [N, B, H, K], updates 1..N
        np.testing.assert_allclose(recording.mean_log_decay[ordinal], g.mean(0), rtol=1e-12)
        for place, (_, position) in enumerate(SMALL.positions()):
            expected = 1 + sum(
                np.prod(np.exp(2 * g[position : position + j]), axis=0)
                for j in range(1, SMALL.horizon + 1)
            )
            np.testing.assert_allclose(recording.weights[ordinal][place], expected, rtol=1e-12)


def test_anchor_states_equal_a_prefill_of_the_same_tokens(
    loaded: LoadedModel, prompts: tuple[Prompt, ...]
) -> None:
    recording = record(loaded, prompts, SMALL, temperature=1.0, seed=5)
    tokens = torch.from_numpy(np.stack([p.tokens for p in prompts]))
    for place, (_, position) in enumerate(SMALL.positions()):
        whole = torch.cat([tokens, recording.generated[:, :position]], 1)
        _, cache = prefill(loaded, whole)
        for ordinal, state in enumerate(recurrent_states(cache)):
            assert_within(recording.anchors[ordinal][place], state, "replay-logits-f32")


def test_each_sequence_is_generated_the_same_in_any_batch(
    loaded: LoadedModel, prompts: tuple[Prompt, ...]
) -> None:
    together = record(loaded, prompts, SMALL, temperature=1.0, seed=5)
    alone = record(loaded, prompts[1:2], SMALL, temperature=1.0, seed=5, first=1)
    assert torch.equal(together.generated[1:2], alone.generated)
    other = record(loaded, prompts[1:2], SMALL, temperature=1.0, seed=6, first=1)
    assert not torch.equal(other.generated, alone.generated)


def test_special_tokens_are_never_generated(
    loaded: LoadedModel, prompts: tuple[Prompt, ...]
) -> None:
    assert set(stop_tokens(loaded)) >= {256, 257, 258}
    hot = record(loaded, prompts, SMALL, temperature=100.0, seed=5)
    assert int(hot.generated.max()) < 256


def test_a_bad_state_stops_with_its_exact_place(
    loaded: LoadedModel, prompts: tuple[Prompt, ...]
) -> None:
    def broken(ordinal, q, k, v, g, beta, initial_state):  # type: ignore[no-untyped-def]
        o, state = reference_prefill(ordinal, q, k, v, g, beta, initial_state)
        if ordinal == 2:
            state[1, 3, 5, 2] = float("inf")
        return o, state

    layer = loaded.spec.layers[2].index
    with swap(loaded, prefill=broken), pytest.raises(NumericError) as caught:
        record(loaded, prompts, SMALL, temperature=0, seed=0)
    assert caught.value.context["layer"] == layer
    assert caught.value.context["index"] == [1, 3, 5, 2]
    assert prompts[1].name in caught.value.message
    assert "head 3, channel 5" in caught.value.message


def test_sampling_inverts_the_distribution_and_respects_bans() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4]])).repeat(5, 1)
    draws = np.array([0.0, 0.0999, 0.1001, 0.65, 0.9999999])
    assert sample(logits, draws, temperature=1.0, banned=[]).tolist() == [0, 0, 1, 3, 3]
    assert sample(logits, draws, temperature=1.0, banned=[0, 3]).tolist() == [1, 1, 1, 2, 2]
    assert sample(logits, draws, temperature=0, banned=[3]).tolist() == [2] * 5


def test_repeated_stretches_are_counted() -> None:
    loop = torch.arange(4).repeat(5)[None]
    assert repeated_share(loop, 4) == pytest.approx(13 / 17)
    assert repeated_share(torch.arange(20)[None], 4) == 0.0
    assert repeated_share(torch.arange(3)[None], 4) == 0.0


def batch(value: float) -> Recording:
    return Recording(
        torch.full((2, 5), int(value)),
        (torch.full((1, 2, 3, 4, 6), value),),
        (torch.full((1, 2, 3), value, dtype=torch.float64),),
        (torch.full((2, 3), -value, dtype=torch.float64),),
    )


RUN = {"seed": 0, "protocol": {"horizon": 256, "windows": [0, 2048]}, "prompts": ["a", "b"]}
OTHER = {"seed": 1, "protocol": {"horizon": 256, "windows": [0, 1024]}, "prompts": ["a", "c"]}
CHANGES = [
    "prompts[1]: b there, c here",
    "protocol.windows[1]: 2048 there, 1024 here",
    "seed: 0 there, 1 here",
]


def test_store_returns_what_was_written_and_names_how_another_run_differs(tmp_path: Path) -> None:
    store = TrajectoryStore.open(tmp_path / "run", RUN, 1)
    assert not store.has(0)
    store.write(0, batch(1.0))
    store.write(1, batch(2.0))
    with pytest.raises(UsageError, match="another process is calibrating"):
        TrajectoryStore.open(tmp_path / "run", RUN, 1)
    store.close()
    again = TrajectoryStore.open(tmp_path / "run", RUN, 1)
    assert again.has(0)
    assert again.read_all(2, "generated", 0).tolist() == [[1] * 5] * 2 + [[2] * 5] * 2
    assert again.read_all(2, "anchors.0", 1).shape == (1, 4, 3, 4, 6)
    assert not list((tmp_path / "run").glob(".*partial*"))
    again.close()
    with pytest.raises(UsageError, match="2 recorded batches of another run") as refused:
        TrajectoryStore.open(tmp_path / "run", OTHER, 1)
    assert refused.value.context["differences"] == CHANGES
    other = TrajectoryStore.open(tmp_path / "run", OTHER, 1, force=True)
    assert not other.has(0)
    other.remove()
    assert not (tmp_path / "run").exists()


def test_two_partial_stores_merge_and_other_runs_do_not(tmp_path: Path) -> None:
    first = TrajectoryStore.open(tmp_path / "a", RUN, 1)
    second = TrajectoryStore.open(tmp_path / "b", RUN, 1)
    first.write(0, batch(1.0))
    second.write(0, batch(1.0))
    second.write(1, batch(2.0))
    assert first.merge(second.folder) == (1,)
    assert first.read_all(2, "generated", 0).tolist() == [[1] * 5] * 2 + [[2] * 5] * 2
    second.write(1, batch(3.0))
    with pytest.raises(SourceError, match="differs from the batch of that number"):
        first.merge(second.folder)
    second.write(1, batch(2.0))
    cut = second.folder / "batch-003.safetensors"
    cut.write_bytes((second.folder / "batch-000.safetensors").read_bytes()[:-1])
    with pytest.raises(SourceError, match=r"batch-003.*not a whole batch"):
        first.merge(second.folder)
    assert not first.has(3)
    other = TrajectoryStore.open(tmp_path / "c", OTHER, 1)
    other.write(2, batch(4.0))
    with pytest.raises(UsageError, match="another run") as refused:
        first.merge(other.folder)
    assert [change.split(":")[0] for change in refused.value.context["differences"]] == [
        change.split(":")[0] for change in CHANGES
    ]
    assert not first.has(2)
    with pytest.raises(UsageError, match=r"run\.json: None there"):
        first.merge(tmp_path / "absent")
    for store in (first, second, other):
        store.close()
