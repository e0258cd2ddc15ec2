"""`calibrate`: from prompts to the key channels worth FP16, and the error of every format."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridstate.quality.calibration import Calibration
    from hybridstate.quality.decoded import TaskScores
    from hybridstate.quality.draw import Draw
    from hybridstate.quality.evaluation import Part, Unit, Work
    from hybridstate.quant.arms import Arm
    from hybridstate.quant.catalogue import ArmName
    from hybridstate.trajectories.model import LoadedModel
    from hybridstate.trajectories.prompts import Prompt, Text
    from hybridstate.trajectories.protocol import Protocol
    from hybridstate.trajectories.store import TrajectoryStore

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
    seeds: int = 1,
    sequences: int | None = None,
    tasks: int = 0,
    greedy: bool = False,
    temperature: float | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    lower_bound: float | None = None,
    merge: Sequence[str | Path] = (),
    deadline: float | None = None,
    dummy: bool = False,
    measure_recording: bool = False,
    force: bool = False,
    progress: "Progress | None" = None,
    **options: Any,
) -> "Calibration":
    """Choose the key channels to keep in FP16, and measure every format on prompts left aside.

    Args:
        model: folder or embedded name; with `dummy` a folder with a config, or a published name.
        out: output folder, read by `export_plan`; appears whole or not at all.
        profile: `quick`, or `paper` for the published protocol.
        k_hi: FP16 key channels per head; 12.5 % of them by default.
        formats: what to compare, comma-separated names and groups of `quant.catalogue`.
        prompts: JSONL file of `{"text": ..., "domain": ...}` instead of the texts shipped here.
        seed: of the prompt draw, the sampling, the random channels and stochastic rounding.
        seeds: so many whole calibrations, of seeds `seed`, `seed + 1`, ...; the first one's choices are
            kept, the validation is over all of them.
        sequences: least validation sequences per seed.
        tasks: texts per task and seed whose facts are asked after thousands of updates; embedded models only.
        greedy: also a draw of greedy trajectories, as a second row.
        temperature: of the reference trajectories; by default 1.0 for embedded models, else greedy.
        device: `auto`, `cpu` or `cuda`.
        dtype: of the weights; `auto` is float32 on a CPU and bfloat16 on a GPU.
        lower_bound: see `analyze`.
        merge: folders that `calibrate_part` wrote for this very run; what is left is done here.
        deadline: stop after so many seconds with the seeds finished so far; the same command continues.
        dummy: synthetic weights of the config's dimensions, made on the device; labelled in every output.
        measure_recording: also time a step that records nothing (`trajectories.stages` says what is measured).
        force: replace files of an earlier calibration.
        progress: called with (stage, done, total); stages record, score, validate, tasks, after the
            seed where there are several.
        **options: other fields of `trajectories.protocol.Protocol`.

    Raises:
        SourceError, UnsupportedModel, NumericError, UsageError, MissingRequirement: see
            `hybridstate.errors`.
    """
    from hybridstate.provenance import check_output_folder
    from hybridstate.quality.evaluation import Clock, OutOfTime, combine, work_folder

    clock = Clock(deadline)
    target = None if out is None else Path(out)
    if target is not None:
        check_output_folder(target, force=force)
    run = _Run.prepare(
        model,
        profile=profile,
        k_hi=k_hi,
        formats=formats,
        prompts=prompts,
        seed=seed,
        seeds=seeds,
        sequences=sequences,
        tasks=tasks,
        greedy=greedy,
        temperature=temperature,
        device=device,
        dtype=dtype,
        lower_bound=lower_bound,
        merge=merge,
        dummy=dummy,
        measure_recording=measure_recording,
        force=force,
        **options,
    )
    found: dict[Unit, Draw] = {}
    with work_folder(target, force=force) as work:
        for unit in run.wanted:
            try:
                draw = run.draw(unit, work, clock.watched(progress, run.prefix(unit)))
            except OutOfTime:
                if not any(u.temperature is None for u in found):
                    raise
                break
            assert draw is not None  # only a part leaves draws to others
            found[unit] = draw
        calibration = combine(found, run.wanted)
        if target is not None and not calibration.document["unfinished"]:
            calibration.write(target, force=force)
            work.remove()
    return calibration


def calibrate_part(
    model: str | Path,
    out: str | Path,
    part: str,
    *,
    force: bool = False,
    deadline: float | None = None,
    progress: "Progress | None" = None,
    **options: Any,
) -> None:
    """Do one part of a run into a folder, for `calibrate(..., merge=folders)` with the same options.

    Args:
        part: `1/2` is the first of two: whole seeds, or recorded batches where there are fewer seeds than parts.
        options: see `calibrate`.

    Raises:
        see `calibrate`.
    """
    from hybridstate.quality.evaluation import Clock, Part, part_folder

    clock, piece = Clock(deadline), Part.parse(part)
    run = _Run.prepare(model, part=piece, force=force, **options)
    with part_folder(Path(out), force=force) as work:
        for unit in piece.whole(run.wanted) or run.wanted:
            run.draw(unit, work, clock.watched(progress, run.prefix(unit)))


@dataclass(frozen=True, slots=True)
class _Run:
    """What all draws of one call have in common."""

    loaded: "LoadedModel"
    texts: "dict[str, list[Text]]"
    settings: "Protocol"
    k_hi: int
    names: "tuple[ArmName, ...]"
    tasks: int
    source: str
    wanted: "tuple[Unit, ...]"
    merge: tuple[Path, ...]
    part: "Part | None"
    measure_recording: bool
    force: bool

    @classmethod
    def prepare(
        cls,
        model: str | Path,
        *,
        profile: str = "quick",
        k_hi: int | None = None,
        formats: str | None = None,
        prompts: str | Path | None = None,
        seed: int = 0,
        seeds: int = 1,
        sequences: int | None = None,
        tasks: int = 0,
        greedy: bool = False,
        temperature: float | None = None,
        device: str = "cpu",
        dtype: str = "auto",
        lower_bound: float | None = None,
        merge: Sequence[str | Path] = (),
        part: "Part | None" = None,
        dummy: bool = False,
        measure_recording: bool = False,
        force: bool = False,
        **options: Any,
    ) -> "_Run":
        """Check the options and load the model."""
        from hybridstate.bench.room import check_room
        from hybridstate.quality.evaluation import check_part_of, units
        from hybridstate.quant.catalogue import parse_list
        from hybridstate.quant.risk import check_k_hi
        from hybridstate.trajectories.dummy import dummy_model
        from hybridstate.trajectories.model import load_model, torch_dtype
        from hybridstate.trajectories.prompts import read_texts, shipped_texts
        from hybridstate.trajectories.protocol import protocol, with_sequences
        from hybridstate.trajectories.stages import stage

        wanted = units(seed, seeds, greedy=greedy)
        for folder in merge:
            check_part_of(Path(folder), wanted)
        settings = protocol(profile, temperature=temperature, **options)
        texts = shipped_texts() if prompts is None else read_texts(Path(prompts))
        if sequences is not None:
            settings = with_sequences(settings, sequences, len(texts))
        tokens = settings.input_tokens + settings.new_tokens
        check_room("--tasks", tasks, 8 * tokens, "texts of every task")
        with stage("load"):
            make = dummy_model if dummy else load_model
            loaded = make(model, device=device, dtype=torch_dtype(dtype), lower_bound=lower_bound)
        return cls(
            loaded=loaded,
            texts=texts,
            settings=settings,
            k_hi=check_k_hi(k_hi, loaded.spec),
            names=parse_list(formats, loaded.spec),
            tasks=tasks,
            source="shipped" if prompts is None else Path(prompts).name,
            wanted=wanted,
            merge=tuple(map(Path, merge)),
            part=part,
            measure_recording=measure_recording,
            force=force,
        )

    def prefix(self, unit: "Unit") -> str:
        """What a stage's name starts with."""
        return "" if len(self.wanted) == 1 else f"{unit.label}: "

    def draw(self, unit: "Unit", work: "Work", progress: "Progress") -> "Draw | None":
        """One draw, as far as this part goes: finished before, or recorded, scored and validated now."""
        from dataclasses import replace

        from hybridstate.quant.calibration import (
            batches,
            record_batches,
            run_fields,
            temperature_of,
        )
        from hybridstate.trajectories.prompts import make_prompts
        from hybridstate.trajectories.record import plain_step_ms
        from hybridstate.trajectories.stages import fact
        from hybridstate.trajectories.store import TrajectoryStore

        settings = self.settings
        if unit.temperature is not None:
            settings = replace(settings, temperature=unit.temperature)
        drawn = make_prompts(self.loaded.encode, self.texts, settings, seed=unit.seed)
        fields = run_fields(self.loaded, drawn, settings, unit.seed)
        depends_on = {
            "run": fields,
            "formats": [name.name for name in self.names],
            "k_hi": self.k_hi,
            "tasks": self.tasks,
        }
        finished = work.finished(unit, depends_on, others=self.merge)
        if finished is not None:
            return finished
        layers = len(self.loaded.spec.layers)
        store = TrajectoryStore.open(work.place(unit), fields, layers, force=self.force)
        try:
            for folder in self.merge:
                if (folder / unit.label / "run.json").is_file():
                    store.merge(folder / unit.label)
            count = len(batches(drawn, settings))
            only = None if self.part is None else self.part.batches(self.wanted, count)
            record_batches(
                self.loaded, drawn, settings, store, seed=unit.seed, only=only, progress=progress
            )
            if self.measure_recording:
                first = batches(drawn, settings)[0]
                temperature = temperature_of(settings, self.loaded.checkpoint)
                plain = plain_step_ms(
                    self.loaded, first, settings, temperature=temperature, seed=unit.seed
                )
                fact("plain_step_ms", plain)
            if only is not None:
                return None
            draw = self._measured(unit, settings, drawn, store, progress)
            return work.finish(unit, draw, depends_on)
        finally:
            store.close()

    def _measured(
        self,
        unit: "Unit",
        settings: "Protocol",
        drawn: "tuple[Prompt, ...]",
        store: "TrajectoryStore",
        progress: "Progress",
    ) -> "Draw":
        """Scores and validation of recorded trajectories."""
        from hybridstate.quality.calibration import assemble
        from hybridstate.quant.calibration import record_batches, score
        from hybridstate.quant.simulate import simulate
        from hybridstate.trajectories.stages import stage

        loaded = self.loaded
        generated = record_batches(loaded, drawn, settings, store, seed=unit.seed)
        with stage("risk"):
            scores = score(
                *(loaded, drawn, settings, store),
                k_hi=self.k_hi,
                seed=unit.seed,
                names=self.names,
                progress=progress,
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
        tasks = self._tasks(unit, settings, scores.arms, progress)
        return assemble(
            *(loaded, drawn, settings, scores, generated, outcome, self.k_hi),
            seed=unit.seed,
            source=self.source,
            tasks=tasks,
        )

    def _tasks(
        self, unit: "Unit", settings: "Protocol", arms: "tuple[Arm, ...]", progress: "Progress"
    ) -> "TaskScores | None":
        """Questions after thousands of updates, where asked for and possible."""
        from hybridstate.checkpoint import EMBEDDED
        from hybridstate.quality.decoded import score_answers, task_texts
        from hybridstate.quant.simulate import simulate

        if self.tasks < 1 or self.loaded.checkpoint.name not in EMBEDDED:
            return None
        texts = task_texts(self.loaded, settings, per_task=self.tasks, seed=unit.seed)
        if texts is None:
            return None
        outcome = simulate(
            self.loaded,
            texts.prompts,
            texts.following,
            arms,
            chunk=settings.chunk,
            batch=settings.batch,
            progress=lambda _, done, total: progress("tasks", done, total),
        )
        return score_answers(outcome, texts)
