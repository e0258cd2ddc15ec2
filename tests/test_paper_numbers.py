"""Every published number has a place: a test here, a topic that will bring one, or real weights.

`tests/data/paper_numbers.json` lists 221 numbers of the two papers with how each was recomputed. A key that
is in none of the three tables below, or in two of them, fails. The checks use the product's own arithmetic
on the geometry of the real models; what the papers merely measured stands under `NEEDS_WEIGHTS`.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridstate import defaults
from hybridstate.checkpoint import DecayParameters
from hybridstate.errors import PlanMismatch
from hybridstate.families import ModelSpec
from hybridstate.horizons.static import static_horizons
from hybridstate.plan.accounting import Accounting, account, packed_bits
from hybridstate.plan.capacity import RESERVATIONS, unit_bytes, usable_slots
from hybridstate.plan.placement import check_tp, contiguous_owner
from hybridstate.plan.select import Selection, select
from hybridstate.trajectories.protocol import DOMAINS, PROFILES, SPLITS
from tests.plan.geometry import SPECS
from tests.plan.test_published import fp32_states, kept, planned, slot_ratio
from tests.synthetic import FITS

DATA = json.loads((Path(__file__).parent / "data" / "paper_numbers.json").read_text())
ENTRIES: dict[str, dict[str, Any]] = {entry["key"]: entry for entry in DATA["numbers"]}


def published(key: str) -> Any:
    return ENTRIES[key]["value"]


def retaining(spec: ModelSpec, counts: list[int]) -> Selection:
    """A selection with the first `counts[l]` units of each layer retained."""
    horizons = []
    for layer, count in zip(spec.layers, counts, strict=True):
        flat = np.zeros(spec.units(layer))
        flat[:count] = 1000.0
        shape = (layer.value_heads, layer.key_dim) if spec.unit == "channel" else (-1,)
        horizons.append(flat.reshape(shape))
    return select(horizons, 64)


def accounting(model: str, share: float = 1.0) -> Accounting:
    spec = SPECS[model]
    return account(spec, retaining(spec, [round(share * spec.units(x)) for x in spec.layers]))


def horizon_of(alpha: float) -> float:
    """The static horizon of a unit whose per-token decay factor at a_s is `alpha`."""
    a_s = defaults.GATE_INPUT["softplus"]
    unit_softplus = math.log(math.e - 1.0)  # softplus of it is 1
    decay = DecayParameters(
        a_log=np.array([math.log(-math.log(alpha))]),
        dt_bias=np.array([unit_softplus - a_s]),
        a_log_dtype="F32",
        dt_bias_dtype="F32",
    )
    horizons = static_horizons(
        decay, gate="softplus", lower_bound=None, gate_input=a_s, epsilon=defaults.EPSILON
    )
    return float(horizons[0])


# --- checks, one per key or per family of keys ----------------------------------------------------

Check = Callable[[str, Any], None]
CHECKS: dict[str, Check] = {}


def checks(*keys: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        for key in keys:
            assert key not in CHECKS, f"{key} is checked twice"
            CHECKS[key] = check
        return check

    return register


def starting(*prefixes: str) -> tuple[str, ...]:
    return tuple(key for key in ENTRIES if key.startswith(prefixes))


@checks(*starting("arch."))
def geometry_is_read_from_the_config(key: str, value: Any) -> None:
    _, model, what = key.split(".")
    spec = SPECS[model]
    layer = spec.layers[0]
    heads = len(spec.layers) * layer.value_heads
    facts = {
        "kda_layers": len(spec.layers),
        "gdn_layers": len(spec.layers),
        "full_attn_layers": spec.num_layers - len(spec.layers),
        "mla_layers": spec.num_layers - len(spec.layers),
        "heads": layer.value_heads,
        "v_heads": layer.value_heads,
        "k_heads": layer.key_heads,
        "d_k": layer.key_dim,
        "conv_kernel": layer.conv_width,
        "conv_channels": layer.conv_channels,
        "gdn_heads_total": heads,
        "layer_head_pairs": heads,
    }
    assert facts[what] == value


@checks(
    *[key for key in starting("bytes.") if "int8" not in key],
)
def bytes_of_a_checkpoint(key: str, value: Any) -> None:
    _, model, what = key.split(".")
    dense, nothing = accounting(model), accounting(model, 0.0)
    temporal, conv = dense.temporal_dense_bytes, dense.conv_bytes
    bits = packed_bits(128, 16, defaults.GROUP)
    facts = {
        "temporal_fp32": temporal,
        "conv_bf16": conv,
        "dense_checkpoint": temporal + conv,
        "C_ckpt_upper_bound": nothing.ratio_full_ragged,
        "damp_k16_full_with_conv": (temporal + conv) / (temporal * bits / 32 + conv),
    }
    assert facts[what] == pytest.approx(value, abs=0 if isinstance(value, int) else 5e-4)


@checks("dasc.epsilon")
def epsilon(key: str, value: Any) -> None:
    assert value == defaults.EPSILON


@checks("dasc.a_s.qwen3_next", "dasc.a_s.kimi_linear", "dasc.a_s.kimi_k3")
def gate_input(key: str, value: Any) -> None:
    assert SPECS[key.rpartition(".")[2]].default_gate_input == value


@checks("dasc.k3.lower_bound")
def lower_bound_of_k3(key: str, value: Any) -> None:
    assert (SPECS["kimi_k3"].gate, SPECS["kimi_k3"].lower_bound) == ("safe", value)


@checks("dasc.k3.min_horizon")
def shortest_horizon_of_the_safe_gate(key: str, value: Any) -> None:
    saturated = DecayParameters(np.array([9.0]), np.array([[50.0]]), "F32", "F32")
    horizons = static_horizons(
        saturated, gate="safe", lower_bound=-5.0, gate_input=0.8, epsilon=defaults.EPSILON
    )
    assert horizons[0, 0] == pytest.approx(value, abs=1e-6)


@checks(*starting("dasc.alpha_cutoff."))
def decay_factor_at_the_cutoff(key: str, value: Any) -> None:
    w_max = int(key.rpartition("W")[2])
    assert defaults.EPSILON ** (1 / w_max) == pytest.approx(value, abs=5e-7)
    assert horizon_of(defaults.EPSILON ** (1 / w_max)) == pytest.approx(w_max, rel=1e-12)


@checks(*[k for k in starting("dasc.fig6.", "dasc.fig8.") if "layer_mean" not in k])
def head_pairs_by_how_much_they_keep(key: str, value: Any) -> None:
    figure = key[: len("dasc.fig6")]
    mixed = published(f"{figure}.mixed")
    none, every = published(f"{figure}.none_retained"), published(f"{figure}.all_retained")
    found = kept(*(("kimi_linear", 16) if figure.endswith("6") else ("kimi_k3", 64))).pairs
    assert found == {"mixed": mixed, "none": none, "all": every, "total": mixed + none + every}
    model = "kimi_linear" if figure.endswith("6") else "kimi_k3"
    assert found["total"] == published(f"arch.{model}.layer_head_pairs")
    assert round(100 * mixed / found["total"], 1) == published(f"{figure}.mixed_pct")


@checks("dasc.k3.prefix_layer_obs")
def observations_are_prefixes_times_layers(key: str, value: Any) -> None:
    assert 4 * published("dasc.a2.prefixes_per_tier") * len(SPECS["kimi_k3"].layers) == value


@checks("dasc.conv_width_is_3")
def only_a_conv_cache_of_width_three_allows_the_published_capacity(key: str, value: Any) -> None:
    best = published("dasc.capacity.kimi_linear.W512.tp_balanced")
    nothing = accounting("kimi_linear", 0.0)
    wider = nothing.conv_bytes * 4 // 3
    with_width_four = (nothing.temporal_dense_bytes + wider) / wider
    assert with_width_four < best < nothing.ratio_full_ragged


@checks("dasc.int8.bits_per_value")
def int8_checkpoint_bits(key: str, value: Any) -> None:
    assert packed_bits(128, 0, 128) == value


# Synthetic horizons at full size: `tests/synthetic.py`, with more about them in `tests/plan/test_published.py`.


@checks(*[key for key in starting("dasc.capacity.") if not key.endswith("slot_effect")])
def capacities_of_figure_4(key: str, value: Any) -> None:
    """Usable slots over usable dense slots, per TP8 rank; synthetic horizons."""
    _, _, model, cutoff, placement = key.split(".")
    found = planned(model, "off" if placement == "off" else "storage")
    state = fp32_states(found)[int(cutoff[1:])]
    assert round(slot_ratio(found, state), 2) == value


@checks("dasc.capacity.slot_effect", "dasc.slots")
def slots_of_a_pool(key: str, value: Any) -> None:
    """floor(B / b) - 1, and not below zero."""
    assert value.endswith("-1") or "-1)/(" in value
    assert [usable_slots(budget, 10) for budget in (0, 9, 19, 20, 39, 40)] == [0, 0, 0, 1, 2, 3]


@checks(*starting("dasc.tp8."))
def bundles_per_rank(key: str, value: Any) -> None:
    model = {"k3": "kimi_k3"}.get(key.split(".")[2], key.split(".")[2])
    spec = SPECS[model]
    assert contiguous_owner((1, spec.layers[0].key_heads), 8)[0].tolist().count(0) == value
    check_tp(spec, 16)
    if model == "qwen3_next":
        with pytest.raises(PlanMismatch):
            check_tp(spec, 32)


@checks(*starting("fit.log10_neg_gs."))
def log_normal_decay_has_the_implied_retention(key: str, value: Any) -> None:
    """A unit is kept at W iff -g_s < ln(1000)/W; within 0.03 of the share each capacity implies."""
    mean, spread = value
    model = key.rpartition(".")[2]
    units = sum(SPECS[model].units(layer) for layer in SPECS[model].layers)
    for w_max, retained in FITS[model].retained.items():
        bound = (math.log10(-math.log(defaults.EPSILON) / w_max) - mean) / spread
        share = 0.5 * math.erfc(-bound / math.sqrt(2))
        assert share == pytest.approx(retained / units, abs=0.03)


@checks(*starting("fit.sd_split."))
def spreads_between_and_within_heads_add_up(key: str, value: Any) -> None:
    total = published(f"fit.log10_neg_gs.{key.rpartition('.')[2]}")[1]
    assert math.hypot(*value) == pytest.approx(total, abs=0.005)


@checks("dasc.fig6.layer_mean_range", "dasc.fig8.layer_mean_range")
def layer_means_of_the_maps(key: str, value: Any) -> None:
    means = kept(*(("kimi_linear", 16) if "fig6" in key else ("kimi_k3", 64))).layer_means
    assert [round(float(means.min()), 3), round(float(means.max()), 3)] == value


@checks(*starting("dasc.fig7."))
def layer_nearest_the_median(key: str, value: Any) -> None:
    found = kept("kimi_linear", 16)
    median = float(np.median(found.layer_means))
    mean = float(found.layer_means[found.nearest_median])
    assert round(median if key.endswith("layer_median") else mean, 3) == value


@checks("dasc.int8.claimed_composition_W16")
def dasc_and_int8_together(key: str, value: Any) -> None:
    """Per TP8 rank; 128 codes and one FP32 scale per retained channel, conv included."""
    dense = accounting("kimi_linear")
    rank, conv = (dense.temporal_dense_bytes + dense.conv_bytes) // 8, dense.conv_bytes // 8
    assert (rank, conv) == (5_427_200, 184_320)
    unit = unit_bytes(SPECS["kimi_linear"], "int8-checkpoint")
    assert rank / (3673 * unit + conv) == pytest.approx(value, abs=0.005)


@checks("dasc.int8.claimed_full_checkpoint")
def the_published_int8_ratio_leaves_the_conv_state_out(key: str, value: Any) -> None:
    dense = accounting("kimi_linear")
    temporal, conv = dense.temporal_dense_bytes, dense.conv_bytes
    bits = packed_bits(128, 0, 128)
    assert 32 / bits == pytest.approx(value, abs=0.005)
    with_conv = (temporal + conv) / (temporal * bits / 32 + conv)
    assert with_conv == pytest.approx(3.533, abs=5e-4)


@checks(*[key for key in starting("bytes.") if "int8" in key])
def int8_checkpoint_ratios(key: str, value: Any) -> None:
    dense = accounting(key.split(".")[1])
    conv = dense.conv_bytes if key.endswith("with_conv") else 0
    packed = dense.temporal_dense_bytes * packed_bits(128, 0, 128) / 32 + conv
    assert (dense.temporal_dense_bytes + conv) / packed == pytest.approx(value, abs=5e-5)


@checks("dasc.padded.kimi_linear_W16")
def padded_against_ragged(key: str, value: Any) -> None:
    """One layer keeps 55.8 % and the mean is 35.87 %: the padded layout pays for the largest."""
    spec = SPECS["kimi_linear"]
    units, layers = spec.units(spec.layers[0]), len(spec.layers)
    top = round(published("dasc.fig6.layer_mean_range")[1] * units)
    total = round(0.3587 * units * layers)
    rest, extra = divmod(total - top, layers - 1)
    counts = [top] + [rest + (n < extra) for n in range(layers - 1)]
    result = account(spec, retaining(spec, counts))
    assert result.ratio_temporal_padded == pytest.approx(value, abs=5e-4)
    assert result.ratio_temporal_ragged == pytest.approx(2.788, abs=5e-4)
    assert result.layout_gain == pytest.approx(1.556, abs=5e-4)


@checks(*starting("dasc.W_u."))
def replay_window_of_one_unit(key: str, value: Any) -> None:
    horizon, w_max = key.removeprefix("dasc.W_u.H").split(".W")
    selection = select([np.array([float(horizon)])], int(w_max))
    assert not selection.retained[0][0]
    assert selection.replay_window[0][0] == value


@checks("dasc.random_mask_seeds")
def seeds(key: str, value: Any) -> None:
    assert list(defaults.RANDOM_MASK_SEEDS) == value


@checks("damp.H")
def risk_horizon(key: str, value: Any) -> None:
    assert value == defaults.RISK_HORIZON


@checks(*starting("damp.bits.K"))
def bits_by_protected_channels(key: str, value: Any) -> None:
    assert packed_bits(128, int(key.rpartition("K")[2]), defaults.GROUP) == value


@checks("damp.format_bits.int8")
def int8_step_bits(key: str, value: Any) -> None:
    assert packed_bits(128, 0, defaults.GROUP) == value


@checks("damp.bits_per_value", "damp.storage_reduction", "damp.extra_bits_over_int8")
def the_mixed_format_in_prose(key: str, value: Any) -> None:
    k_hi = round(defaults.K_HI_SHARE * 128)
    bits = packed_bits(128, k_hi, defaults.GROUP)
    facts = {
        "damp.bits_per_value": bits,
        "damp.storage_reduction": 100 * (1 - bits / 32),
        "damp.extra_bits_over_int8": bits - packed_bits(128, 0, defaults.GROUP),
    }
    assert (bits, facts["damp.storage_reduction"]) == (9.875, 69.140625)
    assert abs(facts[key] - value) <= 0.05


@checks("damp.fp32_state_memory")
def state_memory_at_batch_256(key: str, value: Any) -> None:
    """Five slots per request (three, and two for overlap), temporal state only."""
    assert RESERVATIONS[0].sized == 5
    total = 256 * RESERVATIONS[0].sized * accounting("qwen36_35b").temporal_dense_bytes
    assert total == 75 * 2**30
    assert total / 1e9 == pytest.approx(value, rel=0.01)


@checks("damp.tpot.qwen36")
def the_published_tpot_gain_exceeds_the_published_share(key: str, value: Any) -> None:
    """24.3 % of the time made 2.59x faster saves 14.9 %, not 19.0 %: two different conditions."""
    share, speedup = published("damp.recurrent_share") / 100, published("damp.kernel_speedup")
    assert 100 * share * (1 - 1 / speedup) == pytest.approx(14.92, abs=0.005)
    needed = 1 / (1 - value / 100 / share)
    assert needed > 32 / packed_bits(128, 16, defaults.GROUP)


@checks("damp.acc.qwen36.aime.damp")
def accuracy_is_the_baseline_plus_the_stated_gain(key: str, value: Any) -> None:
    assert published("damp.acc.qwen36.aime.int8_sr") + 19.84 == pytest.approx(value)


@checks(*starting("dasc.c3.reduction."))
def reductions_follow_from_table_4(key: str, value: Any) -> None:
    _, _, _, length, metric = key.split(".")
    row = f"dasc.table4.{length}.{metric}_mean"
    dense, native = published(f"{row}.dense"), published(f"{row}.dasc_nr")
    assert round(100 * (1 - native / dense), 2) == pytest.approx(value)


TABLE2: list[dict[str, Any]] = DATA["dasc_table2"]


def gaps(model: str, *w_max: str) -> list[float]:
    """|DASC - dense| in points, over the rows of a model and the given cutoffs (all if none)."""
    return [
        100 * abs(arm["dasc"] - row["dense"])
        for row in TABLE2
        if row["model"] == model
        for w, arm in row["arms"].items()
        if not w_max or w in w_max
    ]


def wins(model: str, *, without: str = "") -> tuple[int, int]:
    """Entries where DASC beats the random mean, and entries."""
    arms = [
        arm
        for row in TABLE2
        if row["model"] == model and row["bench"] != without
        for arm in row["arms"].values()
    ]
    return sum(arm["dasc"] > arm["random_mean"] for arm in arms), len(arms)


@checks(*starting("dasc.claim."))
def claims_about_table_2(key: str, value: Any) -> None:
    claim = key.removeprefix("dasc.claim.")
    bounds = {
        "kimi&qwen W16 max gap": max(gaps("Kimi-Linear", "16") + gaps("Qwen3-Next", "16")),
        "qwen any W max gap": max(gaps("Qwen3-Next")),
        "k3 W64/128 max gap": max(gaps("Kimi-K3", "64", "128")),
        "k3 W512 max gap IMO": max(gaps("Kimi-K3", "512")),
        "qwen W64 max diff": max(gaps("Qwen3-Next", "64")),
        "k3 W64 max diff": max(gaps("Kimi-K3", "64")),
    }
    if claim in bounds:
        assert bounds[claim] <= value + 1e-9
    elif claim == "kimi dasc>random of 15":
        assert wins("Kimi-Linear", without="LoCoMo (F1)") == (value, 15)
    elif claim == "k3 dasc>random of 15":
        assert wins("Kimi-K3") == (value, 15)
    elif claim == "qwen dasc>random of 18 (not claimed)":
        assert wins("Qwen3-Next") == (10, 18)
    else:
        dense = published("dasc.mmlu_pro.dense")
        assert dense - published("dasc.mmlu_pro.nr_range")[1] == pytest.approx(value)


REPLAYS = {
    "AIME 2026": "aime",
    "HMMT 2026 Feb": "hmmt",
    "IMOAnswerBench": "imo",
    "GPQA-Diamond": "gpqa",
    "MMLU-Pro": "mmlu_pro",
}


@checks(
    "dasc.table2.granularity",
    *[f"dasc.c2.{bench}" for bench in REPLAYS.values()],
)
def accuracies_are_whole_numbers_of_answers(key: str, value: Any) -> None:
    """Every accuracy of Table 2 is k / (questions x replays), printed with four digits."""
    entries = 0
    for row in TABLE2:
        if row["bench"] not in REPLAYS:
            continue
        questions, replays = published(f"dasc.c2.{REPLAYS[row['bench']]}")
        total = questions * replays
        for score in (row["dense"], *(arm["dasc"] for arm in row["arms"].values())):
            nearest = round(round(score * total) / total, 4)
            assert nearest == pytest.approx(score, abs=1e-9), row["bench"]
            entries += 1
    assert entries == 56


@checks("dasc.table5_6.averages")
def ruler_averages(key: str, value: Any) -> None:
    rows = [row["scores"] for model in DATA["dasc_ruler"].values() for row in model]
    assert len(rows) == 66
    for scores in rows:
        parts = [score for name, score in scores.items() if name != "Avg"]
        assert len(parts) == published("dasc.ruler.counts")[2]
        assert abs(sum(parts) / len(parts) - scores["Avg"]) <= 0.005 + 1e-9


@checks(
    "damp.prompts",
    "damp.anchors_per_sequence",
    "damp.anchors_per_split",
    "damp.input_tokens",
    "damp.gen_tokens",
)
def calibration_protocol_of_the_paper(key: str, value: Any) -> None:
    paper = PROFILES["paper"]
    per_split = paper.prompts_per_split * len(DOMAINS)
    updates = [update for _, update in paper.positions()]
    assert updates == [256, 512, 768, 2304, 2560, 2816]
    facts = {
        "damp.prompts": per_split * len(SPLITS),
        "damp.anchors_per_sequence": len(updates),
        "damp.anchors_per_split": per_split * len(updates),
        "damp.input_tokens": paper.input_tokens,
        "damp.gen_tokens": paper.new_tokens,
    }
    assert facts[key] == value
    assert paper.horizon == published("damp.H")


@checks("dasc.wildchat", "dasc.mmlu_block")
def workload_arithmetic(key: str, value: Any) -> None:
    first, second, third = value
    if key == "dasc.wildchat":
        assert first * second == third
    else:
        assert first - second >= third


# --- what comes later, and what only real weights can show -----------------------------------------

LATER: dict[str, tuple[str, ...]] = {
    "calibration": (
        "dasc.a2.tiers",
        "dasc.a2.prefixes_per_tier",
        "dasc.a2.min_chars_factor",
        "dasc.a2.candidates",
        "damp.W_range",
        "damp.format_bits.int4",
        "damp.format_bits.fp8",
        "damp.format_bits.nvfp4",
    ),
    "serving": (
        "dasc.int8.qmax",  # the INT8 checkpoint codec
        "dasc.int8.amax_floor",
        "dasc.ruler.counts",
        "dasc.c2.locomo",
    ),
}

NEEDS_WEIGHTS: tuple[str, ...] = (
    *starting("dasc.fig1.median_alpha."),
    *starting("dasc.table1a.", "dasc.table1b."),
    "dasc.a2.sharegpt_conversations",
    *starting("dasc.ttft_reduction.", "dasc.e2e_reduction."),
    *starting("dasc.table4."),
    "dasc.table3",
    "dasc.wr.accuracy_gain_W128",
    *starting("dasc.mmlu_pro."),
    "damp.recurrent_share",
    "damp.kernel_speedup",
    "damp.tpot.kimi_linear",
    "damp.tpot.k3",
    "damp.acc.qwen36.aime.int8",
    "damp.acc.qwen36.aime.int8_sr",
    "damp.acc.qwen36.aime.fp32",
    "damp.error_concentration",
    *starting("damp.decay_rank_stability."),
    *starting("damp.gdn_aeff."),
    "damp.split_overlap",
    "damp.split_rank_spearman",
    "damp.calibration_minutes",
    "damp.ttft.k3",
    "damp.ruler_max_abs_diff",
    "damp.tables_missing",  # the bodies of DAMP's tables are not in the stored text
)


def test_every_key_has_exactly_one_place() -> None:
    places = [*CHECKS, *NEEDS_WEIGHTS, *(key for keys in LATER.values() for key in keys)]
    twice = sorted({key for key in places if places.count(key) > 1})
    assert not twice, f"listed twice: {twice}"
    assert not set(places) - set(ENTRIES), f"not in the file: {sorted(set(places) - set(ENTRIES))}"
    assert not set(ENTRIES) - set(places), f"no place: {sorted(set(ENTRIES) - set(places))}"
    assert len(ENTRIES) == 221


@pytest.mark.parametrize("key", list(CHECKS))
def test_published_number_reproduces(key: str) -> None:
    CHECKS[key](key, published(key))


def test_fitted_decay_distributions_have_the_published_medians() -> None:
    """The fits use capacities only; their medians of alpha land within 0.03 of the published."""
    for model in ("qwen3_next", "kimi_linear", "kimi_k3"):
        mean = published(f"fit.log10_neg_gs.{model}")[0]
        median = math.exp(-(10**mean))
        assert median == pytest.approx(ENTRIES[f"fit.log10_neg_gs.{model}"]["recomputed"], abs=5e-4)
        assert abs(median - published(f"dasc.fig1.median_alpha.{model}")) < 0.03
