"""figures/: the pictures of recorded results, and what each shows in words."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quality_tables import merged
from recordings import (
    CALIBRATED,
    DECODED,
    MODELS,
    QUALITY,
    ROOT,
    SERVED,
    VALIDATED,
    Run,
    embedded,
    recorded,
    runs,
    synthetic,
    trained,
)

FIGURES = ROOT / "figures"
SHOWS = {
    "static_observed": "observed horizon of every unit against its static one, with the cutoffs as lines",
    "effective_decay": "effective decay of all units in ascending order, with the spread over texts",
    "decay_domains": "effective decay of every unit on code and on prose against that on math",
    "decay_traces": "decay factors over time of a short-lived, a middle and a long-lived unit",
    "restore": "exact answers and prose KL against the cutoff: zeros, replay, random masks and the dense state",
    "divergence_bits": "KL of every storage format against its bits per value, and against the FP16 channels kept",
    "error_steps": "KL and state error of the main formats growing over decode steps",
    "channel_error": "squared INT8 error of every key channel, before and after values are scaled and reordered",
    "state_magnitude": "size of one head's state by key channel and value dimension",
    "quality_cutoffs": "answers against dense ones and KL of the first token after compressed hits, by cutoff",
    "quality_ttft": "answers against dense ones and KL by time to the first token of one request",
    "quality_formats": "answers against dense ones and KL with every format of the live state",
    "tpot": "cut of the time per output token against FP32, by batch and format",
    "components": "milliseconds of a decode step by component, one bar per batch and format",
    "serving_cutoffs": "time to the first token, whole time and token hit rate against the cutoff, by arm",
    "serving_policies": "time to the first token, whole time and token hit rate by working set and eviction policy",
    "serving_ratios": "time to the first token, whole time and token hit rate against the working set over dense slots",
}
"""What is to be seen in a picture, for those who cannot see it."""

FIGURE_W_MAX = (16, 64, 128, 512)


def link(folder: str, picture: str, model: str) -> str:
    """Markdown of a picture, from a page in docs/."""
    return f"![{model}: {SHOWS[picture]}](../{FIGURES.name}/{folder}/{picture}.png)"


def draw() -> None:
    """What `analyze -o` draws of the embedded models, and every recorded result that has a picture."""
    from hybridstate import analyze
    from hybridstate.figures import (
        analysis_figures,
        calibration_figures,
        decode_figures,
        precision_figure,
        restore_figure,
        serving_figures,
        validation_figures,
    )
    from hybridstate.figures.quality import quality_figures
    from hybridstate.figures.serving import policy_figure
    from hybridstate.figures.update import update_figure

    for name in filter(embedded, MODELS):
        analysis_figures(analyze(name, w_max=FIGURE_W_MAX), _folder(name))
        print(f"figures/{name}/")

    def validated(result: dict[str, Any], name: str, folder: Path) -> object:
        return validation_figures(result["validation"], name, folder)

    def updated(result: dict[str, Any], _name: str, folder: Path) -> None:
        update_figure(result, folder)

    def whole(result: dict[str, Any]) -> bool:
        return synthetic(result) and "speedups" in result  # absent where a deadline ended the run

    def decoded(result: dict[str, Any], _name: str, folder: Path) -> object:
        return decode_figures(result, folder)

    of_a_model: tuple[tuple[Iterator[Run], Callable[[dict[str, Any], str, Path], object]], ...] = (
        (runs("restore-*.json", trained), restore_figure),
        (runs(VALIDATED, trained), validated),
        (runs(CALIBRATED, trained), precision_figure),
        (runs(CALIBRATED, trained), calibration_figures),
        (runs(QUALITY, merge=merged), quality_figures),
        (runs(DECODED, whole), decoded),
        (runs("update.json"), updated),
    )
    for found, draw_run in of_a_model:
        for run in found:
            draw_run(run.result, run.name, _folder(run.name))
            print(f"figures/{run.name}/ from {', '.join(path.name for path, _ in run.files)}")
    for pattern in SERVED:
        for run in runs(pattern):
            ((path, _),) = run.files
            serving_figures(run.result, run.name, _folder(f"serving/{path.stem}"))
            print(f"figures/serving/{path.stem}/ from {path.name}")
    for name, documents in policies().items():
        results = [document["result"] for _, document in documents]
        policy_figure(results, "nr-64", results[0]["model"], _folder(f"serving/{name}"))
        print(f"figures/serving/{name}/ from {', '.join(path.name for path, _ in documents)}")


def policies() -> dict[str, list[tuple[Path, dict[str, Any]]]]:
    """Simulations that differ in the eviction policy alone: name of LRU's -> (file, document), LRU first.

    benchmarks/policies-POLICY-NAME.json belongs to benchmarks/simulate-NAME.json.
    """
    found: dict[str, list[tuple[Path, dict[str, Any]]]] = {}
    for path, document in recorded("policies-*.json"):
        policy = document["result"]["policy"]
        name = f"simulate-{path.stem.removeprefix(f'policies-{policy}-')}"
        if name not in found:
            found[name] = list(recorded(f"{name}.json"))
        found[name].append((path, document))
    return found


def _folder(name: str) -> Path:
    folder = FIGURES / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
