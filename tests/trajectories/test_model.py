"""Loading restores decay parameters; the installed recurrences agree with one full forward pass."""

import copy
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridstate.checkpoint import open_checkpoint
from hybridstate.errors import MissingRequirement, NumericError, SourceError, UsageError
from hybridstate.kernels import reference
from hybridstate.trajectories.model import (
    LayerStates,
    LoadedModel,
    decode,
    load_model,
    new_cache,
    prefill,
    recurrent_states,
    select_sequences,
    set_states,
    states,
    swap,
)
from tests.tiny import write_checkpoint
from tests.tolerances import assert_within

CASES = {
    "gdn-gva1": {"family": "qwen3_5", "key_heads": 2, "value_heads": 2},
    "gdn-gva2": {"family": "qwen3_5", "key_heads": 2, "value_heads": 4},
    "gdn-gva3": {"family": "qwen3_5", "key_heads": 2, "value_heads": 6},
    "gdn-packed": {"family": "qwen3_next"},
    "gdn-experts": {"family": "qwen3_5_moe"},
    "gdn-negative-eigenvalues": {"family": "olmo_hybrid"},
    "kda": {"family": "kimi_linear"},
}


@pytest.fixture(scope="module", params=list(CASES))
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    return load_model(str(write_checkpoint(folder, **CASES[request.param])))


@pytest.fixture
def tokens(loaded: LoadedModel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, 97, (2, 75), generator=generator)


def full_logits(loaded: LoadedModel, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return loaded.model(input_ids=tokens, use_cache=False).logits


def test_chunked_prefill_then_decode_equals_full_forward(
    loaded: LoadedModel, tokens: torch.Tensor
) -> None:
    expected = full_logits(loaded, tokens)
    found, cache = prefill(loaded, tokens[:, :65], chunk=33, keep_logits=True)
    steps = [found]
    steps += [decode(loaded, tokens[:, t], cache)[:, None] for t in range(65, 75)]
    assert_within(torch.cat(steps, 1), expected, "replay-logits-f32")


def test_own_recurrence_agrees_with_the_modeling_file(
    loaded: LoadedModel, tokens: torch.Tensor
) -> None:
    """Every number goes through our functions: compare with the file's own, called on our inputs."""
    runtime = loaded.spec.family.runtime
    assert runtime is not None
    modeling = sys.modules[runtime.module]
    original = getattr(modeling, runtime.prefill).original

    def theirs(ordinal, q, k, v, g, beta, initial_state):  # type: ignore[no-untyped-def]
        repeat = v.shape[2] // q.shape[2]
        q, k = (x.repeat_interleave(repeat, 2) for x in (q, k))
        return original(
            q,
            k,
            v,
            g=g,
            beta=beta,
            initial_state=initial_state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )

    ours = full_logits(loaded, tokens)
    with swap(loaded, prefill=theirs):
        assert_within(ours, full_logits(loaded, tokens), "transformers-f32")


def test_swap_sees_each_layer_in_order_with_unexpanded_keys(
    loaded: LoadedModel, tokens: torch.Tensor
) -> None:
    calls: list[tuple[int, int]] = []

    def prefill_spy(ordinal, q, k, v, g, beta, initial_state):  # type: ignore[no-untyped-def]
        layer = loaded.spec.layers[ordinal]
        assert q.shape[2] == k.shape[2] == layer.key_heads
        assert v.shape[2:] == (layer.value_heads, layer.value_dim)
        calls.append((ordinal, q.shape[1]))
        return reference.chunk_prefill(q, k, v, g, beta, initial_state)

    def decode_spy(ordinal, q, k, v, g, beta, initial_state):  # type: ignore[no-untyped-def]
        assert q.dim() == 3
        calls.append((ordinal, 1))
        return reference.recurrent_step(q, k, v, g, beta, initial_state)

    with swap(loaded, prefill=prefill_spy, decode=decode_spy):
        _, cache = prefill(loaded, tokens[:, :5])
        decode(loaded, tokens[:, 5], cache)
    layers = range(len(loaded.spec.layers))
    assert calls == [(i, 5) for i in layers] + [(i, 1) for i in layers]
    calls.clear()
    prefill(loaded, tokens[:, :5])
    assert not calls


def test_states_are_clones_and_set_states_resumes_exactly(
    loaded: LoadedModel, tokens: torch.Tensor
) -> None:
    _, cache = prefill(loaded, tokens[:, :20])
    kept = states(cache)
    layer = loaded.spec.layers[0]
    assert kept.recurrent[0].shape == (2, layer.value_heads, layer.key_dim, layer.value_dim)
    after = decode(loaded, tokens[:, 20], cache)
    assert not torch.equal(kept.recurrent[0], recurrent_states(cache)[0])

    _, other = prefill(loaded, tokens[:, :20])
    for state in recurrent_states(other):
        state.fill_(float("nan"))
    last_columns = LayerStates(kept.recurrent, tuple(c[..., 1:] for c in kept.conv))
    set_states(other, last_columns)
    assert torch.equal(decode(loaded, tokens[:, 20], other), after)
    assert all(torch.isfinite(s).all() for s in kept.recurrent)


def test_set_states_fills_an_empty_cache_and_refuses_another_shape(
    loaded: LoadedModel, tokens: torch.Tensor
) -> None:
    _, cache = prefill(loaded, tokens[:, :20])
    kept = states(cache)
    empty = new_cache(loaded)
    set_states(empty, kept)
    again = states(empty)
    assert all(torch.equal(a, b) for a, b in zip(kept.recurrent, again.recurrent, strict=True))
    wrong = LayerStates(tuple(s[:, :, :-1] for s in kept.recurrent), kept.conv)
    with pytest.raises(NumericError, match="recurrent state of linear layer 0"):
        set_states(cache, wrong)
    with pytest.raises(NumericError, match="states of 1 layers"):
        set_states(cache, LayerStates(kept.recurrent[:1], kept.conv[:1]))


def test_sequences_can_be_repeated_and_reordered(loaded: LoadedModel, tokens: torch.Tensor) -> None:
    _, cache = prefill(loaded, tokens[:, :20])
    single = decode(loaded, tokens[:, 20], cache)
    _, cache = prefill(loaded, tokens[:, :20])
    select_sequences(cache, [1, 0, 1])
    found = decode(loaded, tokens[[1, 0, 1], 20], cache)
    assert_within(found, single[[1, 0, 1]], "replay-logits-f32")


def test_decay_parameters_keep_their_stored_precision_in_bfloat16(tmp_path: Path) -> None:
    for family in ("qwen3_5", "kimi_linear"):
        folder = write_checkpoint(tmp_path / family, family)
        loaded = load_model(str(folder), dtype=torch.bfloat16)
        assert loaded.dtype == torch.bfloat16
        checkpoint = open_checkpoint(str(folder))
        layer = loaded.spec.layers[1]
        stored = checkpoint.read(layer.prefix + "A_log")
        present = {
            name.rsplit(".", 1)[-1]: value
            for name, value in loaded.model.named_parameters()
            if f"layers.{layer.index}." in name
        }
        assert present["A_log"].dtype == torch.float32
        assert np.array_equal(present["A_log"].numpy().ravel(), stored.ravel())
        tokens = torch.randint(3, 97, (1, 9), generator=torch.Generator().manual_seed(0))
        logits, _ = prefill(loaded, tokens)
        assert torch.isfinite(logits).all()


def test_two_models_of_a_family_do_not_disturb_each_other(tmp_path: Path) -> None:
    first = load_model(str(write_checkpoint(tmp_path / "a", seed=1)))
    tokens = torch.randint(3, 97, (1, 12), generator=torch.Generator().manual_seed(0))
    before = full_logits(first, tokens)
    second = load_model(str(write_checkpoint(tmp_path / "b", seed=2, value_heads=6)))

    def broken(*_: object) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("the other model must not run this")

    with swap(second, prefill=broken):
        assert torch.equal(full_logits(first, tokens), before)


def test_an_interrupted_forward_leaves_no_layer_running(tmp_path: Path) -> None:
    loaded = load_model(str(write_checkpoint(tmp_path / "a")))
    tokens = torch.randint(3, 97, (1, 12), generator=torch.Generator().manual_seed(0))
    before = full_logits(loaded, tokens)

    def interrupted(*_: object) -> tuple[torch.Tensor, torch.Tensor]:
        raise KeyboardInterrupt

    with swap(loaded, prefill=interrupted), pytest.raises(KeyboardInterrupt):
        full_logits(loaded, tokens)
    assert torch.equal(full_logits(loaded, tokens), before)


@pytest.mark.parametrize("made", [copy.deepcopy, functools.partial(torch.compile, backend="eager")])
def test_compiled_and_copied_models_run_what_was_swapped_in(
    made: Callable[[Any], Any], tmp_path: Path
) -> None:
    loaded = load_model(str(write_checkpoint(tmp_path / "a")))
    tokens = torch.randint(3, 97, (1, 12), generator=torch.Generator().manual_seed(0))
    ran: list[int] = []
    usual = loaded.recurrence.prefill

    def counted(ordinal: int, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ran.append(ordinal)
        return usual(ordinal, *rest)

    other = made(loaded.model)
    with swap(loaded, prefill=counted), torch.no_grad():
        other(tokens)
    assert sorted(set(ran)) == list(range(len(loaded.spec.layers)))


def test_absent_hardware_and_tokenizer_are_named(tmp_path: Path) -> None:
    folder = str(write_checkpoint(tmp_path / "a"))
    with pytest.raises(UsageError, match="'quantum' is not a device"):
        load_model(folder, device="quantum")
    if not torch.cuda.is_available():
        with pytest.raises(MissingRequirement, match="sees no GPU"):
            load_model(folder, device="cuda")
    with pytest.raises(SourceError, match="no tokenizer files"):
        load_model(folder).encode("text")


def test_byte_tokenizer_encodes_bytes(tmp_path: Path) -> None:
    folder = str(write_checkpoint(tmp_path / "a", tokenizer=True))
    assert load_model(folder).encode("A \n") == [65, 32, 10]


def test_a_tokenizer_of_another_model_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a", tokenizer=True, vocab=100)
    with pytest.raises(SourceError, match="the tokenizer gives token 111, the model embeds 100"):
        load_model(folder).encode("no")
