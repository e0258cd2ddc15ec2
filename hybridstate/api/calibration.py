"""`calibrate`: from prompts to the key channels worth FP16, and the error of every format."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridstate.quality.calibration import Calibration

    Progress = Callable[[str, int, int], None]


def calibrate(
    model: str | Path,
    out: str | Path | None = None,
    *,
    profile: str = "quick",
    k_hi: int | None = None,
    formats: str | None = None,
    prompts: str | Path | None = None,
    seed: int = 0,
    temperature: float | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    lower_bound: float | None = None,
    force: bool = False,
    progress: "Progress | None" = None,
    **options: Any,
) -> "Calibration":
    """Choose the key channels to keep in FP16, and measure every format on prompts left aside.

    Args:
        model: folder or embedded name.
        out: output folder, read by `export_plan`; appears whole or not at all.
        profile: `quick`, or `paper` for the published protocol.
        k_hi: FP16 key channels per head; 12.5 % of them by default.
        formats: what to compare, comma-separated names and groups of `quant.catalogue`.
        prompts: JSONL file of `{"text": ..., "domain": ...}` instead of the texts shipped here.
        seed: of the prompt draw, the sampling and the random channels.
        temperature: of the reference trajectories; by default 1.0 for embedded models, else greedy.
        device: `auto`, `cpu` or `cuda`.
        dtype: of the weights; `auto` is float32 on a CPU and bfloat16 on a GPU.
        lower_bound: see `analyze`.
        force: replace files of an earlier calibration.
        progress: called with (stage, done, total); stages record, score, validate.
        **options: other fields of `trajectories.protocol.Protocol`.

    Raises:
        SourceError, UnsupportedModel, NumericError, UsageError, MissingRequirement: see
            `hybridstate.errors`.
    """
    from hybridstate.provenance import check_output_folder
    from hybridstate.quality.calibration import assemble
    from hybridstate.quant.calibration import record_batches, run_fields, score, trajectory_store
    from hybridstate.quant.catalogue import parse_list
    from hybridstate.quant.risk import check_k_hi
    from hybridstate.quant.simulate import simulate
    from hybridstate.trajectories.model import load_model, torch_dtype
    from hybridstate.trajectories.prompts import make_prompts, read_texts, shipped_texts
    from hybridstate.trajectories.protocol import protocol

    target = None if out is None else Path(out)
    if target is not None:
        check_output_folder(target, force=force)
    settings = protocol(profile, temperature=temperature, **options)
    texts = shipped_texts() if prompts is None else read_texts(Path(prompts))
    loaded = load_model(model, device=device, dtype=torch_dtype(dtype), lower_bound=lower_bound)
    channels = check_k_hi(k_hi, loaded.spec)
    names = parse_list(formats, loaded.spec)
    drawn = make_prompts(loaded.encode, texts, settings, seed=seed)
    run = run_fields(loaded, drawn, settings, seed)
    with trajectory_store(target, run, len(loaded.spec.layers), force=force) as store:
        generated = record_batches(loaded, drawn, settings, store, seed=seed, progress=progress)
        scores = score(
            loaded, drawn, settings, store, k_hi=channels, seed=seed, names=names, progress=progress
        )
        held_out = [row for row, prompt in enumerate(drawn) if prompt.split == "validate"]
        outcome = simulate(
            loaded,
            tuple(drawn[row] for row in held_out),
            generated[held_out],
            scores.arms,
            chunk=settings.chunk,
            batch=settings.batch,
            progress=progress,
        )
        source = "shipped" if prompts is None else Path(prompts).name
        calibration = assemble(
            loaded, drawn, settings, scores, generated, outcome, channels, seed=seed, source=source
        )
        if target is not None:
            calibration.write(target, force=force)
    return calibration
