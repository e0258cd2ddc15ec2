"""A calibration that is not run: what it would refuse, and what it would do."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hybridstate.checkpoint import open_checkpoint
from hybridstate.quality.evaluation import check_part_of, units
from hybridstate.quant.calibration import estimate
from hybridstate.quant.catalogue import parse_list
from hybridstate.quant.risk import check_k_hi
from hybridstate.trajectories.dummy import ByteTokenizer, dummy_checkpoint
from hybridstate.trajectories.model import (
    encode,
    quiet_loading,
    tokenizer_of,
    torch_device,
    torch_dtype,
)
from hybridstate.trajectories.prompts import make_prompts, read_texts, shipped_texts
from hybridstate.trajectories.protocol import protocol, with_sequences


def dry_run(
    model: str,
    *,
    profile: str,
    k_hi: int | None,
    formats: str | None,
    prompts: Path | None,
    seed: int,
    seeds: int,
    sequences: int | None,
    greedy: bool,
    temperature: float | None,
    device: str,
    dtype: str,
    lower_bound: float | None,
    merge: Sequence[Path],
    dummy: bool,
    **_others: Any,
) -> tuple[str, dict[str, Any]]:
    """The model's name and the sizes of the run, after every check that needs no weights in memory."""
    wanted = units(seed, seeds, greedy=greedy)
    for part in merge:
        check_part_of(part, wanted)
    torch_device(device)
    torch_dtype(dtype)
    if dummy:
        checkpoint = dummy_checkpoint(model, lower_bound=lower_bound)
    else:
        checkpoint = open_checkpoint(model, lower_bound=lower_bound, weights=True)
    check_k_hi(k_hi, checkpoint.spec)
    names = parse_list(formats, checkpoint.spec)
    texts = shipped_texts() if prompts is None else read_texts(prompts)
    settings = protocol(profile, temperature=temperature)
    if sequences is not None:
        settings = with_sequences(settings, sequences, len(texts))
    with quiet_loading():
        tokenizer = ByteTokenizer() if dummy else tokenizer_of(checkpoint)
    take = partial(encode, tokenizer=tokenizer, checkpoint=checkpoint)
    make_prompts(take, texts, settings, seed=seed)  # refuses more prompts than there is text for
    plan = {"draws": len(wanted)} if len(wanted) > 1 else {}
    plan |= estimate(checkpoint, settings, domains=len(texts), formats=len(names))
    return checkpoint.name, plan
