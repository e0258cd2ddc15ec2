"""The cached-state intervention: what each arm zeroes, one prefix for all, the needle and its depths."""

import json

import numpy as np
import pytest
import torch

from hybridstate.errors import NumericError, UsageError
from hybridstate.quality import intervention as module
from hybridstate.quality.arms import Outcomes, cached_prefix
from hybridstate.quality.intervention import (
    DEPTHS,
    PROBE,
    ProbeOptions,
    needle,
    probe,
    require_hit,
    require_same,
    run_interventions,
    taken_away,
)
from hybridstate.quality.reuse import Cases
from hybridstate.runtime.restore import Prefix, resume
from hybridstate.trajectories.model import LoadedModel, forward, load_model


@pytest.fixture(scope="module", params=["tiny_gdn", "tiny_kda"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return load_model(str(request.getfixturevalue(request.param)))


@pytest.fixture(scope="module")
def prefix(loaded: LoadedModel) -> Prefix:
    tokens = torch.randint(97, 122, (3, 40), generator=torch.Generator().manual_seed(4))
    return cached_prefix(loaded, tokens, rows=2)


def zero(tensors: tuple[torch.Tensor, ...]) -> bool:
    return not any(bool(tensor.any()) for tensor in tensors)


@pytest.mark.parametrize(
    ("name", "kv_gone", "states_gone", "conv_gone"),
    [
        ("nothing", False, False, False),
        ("zero-kv", True, False, False),
        ("zero-linear", False, True, False),
        ("zero-linear-conv", False, True, True),
        ("zero-both", True, True, False),
        ("zero-all", True, True, True),
    ],
)
def test_each_arm_zeroes_what_it_says_and_keeps_the_rest(
    prefix: Prefix, name: module.Intervention, kv_gone: bool, states_gone: bool, conv_gone: bool
) -> None:
    kv, states, conv = taken_away(prefix, name)
    assert zero(states) == states_gone
    assert zero(conv) == conv_gone
    pairs = tuple(tensor for pair in kv.values() for tensor in pair)
    assert zero(pairs) == kv_gone
    for kept, original, gone in (
        (states, prefix.states, states_gone),
        (conv, prefix.conv, conv_gone),
        (pairs, tuple(t for pair in prefix.kv.values() for t in pair), kv_gone),
    ):
        if not gone:  # the same tensors, not copies: the cached prefix itself is reused
            assert all(a is b for a, b in zip(kept, original, strict=True))
    assert not zero(prefix.states)


def test_resuming_nothing_continues_like_the_whole_text(
    loaded: LoadedModel, prefix: Prefix
) -> None:
    suffix = torch.full((3, 4), 100)
    past = resume(loaded, *taken_away(prefix, "nothing"))
    require_hit(past, prefix, "nothing")
    resumed = forward(loaded, suffix, past)
    whole = loaded.model(input_ids=torch.cat([prefix.tokens, suffix], 1)).logits[:, -4:]
    assert resumed.argmax(-1).tolist() == whole.argmax(-1).tolist()


def test_a_cache_without_the_whole_prefix_is_no_hit(loaded: LoadedModel, prefix: Prefix) -> None:
    kv = {b: (k[..., :-1, :], v[..., :-1, :]) for b, (k, v) in prefix.kv.items()}
    past = resume(loaded, kv, prefix.states, prefix.conv)
    with pytest.raises(NumericError, match=r"block 3 resumes from 39 tokens.*has 40"):
        require_hit(past, prefix, "zero-kv")


@pytest.mark.parametrize("part", ["states", "conv", "kv"])
def test_an_arm_that_writes_into_the_shared_prefix_is_caught(prefix: Prefix, part: str) -> None:
    changed = prefix.rows([0, 1, 2])
    require_same(changed, prefix, "zero-both")
    tensors = {"states": changed.states, "conv": changed.conv, "kv": changed.kv[3]}[part]
    tensors[0].view(-1)[5] += 1
    with pytest.raises(NumericError, match="zero-both changed the cached prefix"):
        require_same(changed, prefix, "zero-both")


def test_the_reference_comes_first(loaded: LoadedModel) -> None:
    cases = Cases("x", (0,), *(torch.ones(1, n, dtype=torch.long) for n in (4, 2, 1)), (1,))
    with pytest.raises(NumericError, match="first intervention must be `nothing`"):
        run_interventions(
            loaded, cases, Outcomes(), rows=1, done=lambda _n: None, names=("zero-kv",)
        )


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_needle_lies_at_its_depth(depth: float) -> None:
    found = needle(np.random.default_rng(3), tokens=512, depth=depth)
    assert len(found.prompt) == 512
    fact = found.question[1:] + found.answer + b";"
    assert found.prompt.count(fact) == 1
    assert found.context.index(fact) == round(depth * (len(found.context) - len(fact)))
    assert found.question[1:4].isupper()
    assert found.answer.islower()


def test_the_probe_counts_depths_arms_and_checks(loaded: LoadedModel) -> None:
    seen: list[tuple[str, int, int]] = []
    options = ProbeOptions(examples=3, tokens=256, rows=2, depths=(0.0, 1.0))
    found = probe(loaded, options, progress=lambda *step: seen.append(step))
    json.dumps(found, allow_nan=False)
    assert seen[-1] == ("intervention", 36, 36)
    assert [arm["arm"] for arm in found["arms"]] == list(PROBE)
    assert found["prefix"]["captured"] == 4  # 2 depths, 2 + 1 cases each
    assert found["prefix"]["checked"] == 24
    assert len(set(found["prefix"]["digests"])) == 4
    for arm in found["arms"]:
        assert [depth["cases"] for depth in arm["by_depth"]] == [3, 3]
        mean = np.mean([depth["accuracy"] for depth in arm["by_depth"]])
        assert arm["accuracy"] == pytest.approx(mean)
    assert found["arms"][0]["kl"] == 0
    assert all(arm["kl"] > 0 for arm in found["arms"][1:])
    assert found["task_data"] == "synthetic"
    assert probe(loaded, options)["prefix"]["digests"] == found["prefix"]["digests"]


def test_options_are_checked() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        ProbeOptions(examples=0).check()
    with pytest.raises(UsageError, match="at least 256 tokens"):
        ProbeOptions(tokens=100).check()
    assert ProbeOptions.on("cuda", examples=100).rows > ProbeOptions.on("cpu", examples=100).rows
