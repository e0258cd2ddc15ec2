"""Recorded results in `benchmarks/`, where their numbers come from, and pages with generated blocks."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
MODELS = ("tiny-gdn", "tiny-kda")

CALIBRATED = "calibrate-*.json"
VALIDATED = "validate-*.json"
QUALITY = "quality-*.json"
DECODED = "decode-*.json"
SERVED = ("serve-*.json", "simulate-*.json")

Merge = Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]

BLOCK = re.compile(
    r"(?P<head><!-- generated: (?P<name>[a-z-]+)[^>]*-->\n)(?P<body>.*?)(?P<tail><!-- end -->)",
    re.S,
)


def recorded(pattern: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Result files, by name without its ending; a document with an envelope gives what is inside it as `result`."""
    for path in sorted(BENCHMARKS.glob(pattern), key=_plain_first):
        document: dict[str, Any] = json.loads(path.read_text())
        yield path, document if "result" in document else {"result": document}


def _plain_first(path: Path) -> tuple[str, str]:
    """What ran as it is comes before its variants, also with think time: NAME, NAME-think, NAME-kv-think."""
    return path.stem.removesuffix("-think"), path.stem


def model_name(path: Path, document: dict[str, Any]) -> str:
    """The embedded name or the folder's name, never a path of the recording machine."""
    named = document.get("model") or document["result"].get("model") or path.stem
    return Path(named["name"] if isinstance(named, dict) else named).name


def _program(document: dict[str, Any]) -> str:
    """What ran: the command line, or a script by its name."""
    command = str(document.get("command", ""))
    return f"python {command}" if command.startswith("scripts/") else "hybridstate"


def source_line(path: Path, document: dict[str, Any]) -> str:
    """Where a table comes from: file, device, versions, commit, and whether the code was changed beside it."""
    result = document["result"]
    named = (
        document.get("provenance"),
        *(result.get(key) for key in ("provenance", "environment", "versions")),
    )
    env: dict[str, Any] = next(filter(None, named), {})
    parts = [f"[{path.name}](../{path.relative_to(ROOT)})"]
    parts += [str(env["device"])] if env.get("device") else []
    parts += [
        f"{name} {env[name]}" for name in ("torch", "transformers", "triton") if env.get(name)
    ]
    if env.get("commit"):
        changed = " (modified tree)" if env.get("modified") else ""
        parts.append(f"commit {env['commit'][:12]}{changed}")
    command = (
        f" Command: `{_program(document)} {' '.join(document['arguments'])}`."
        if "arguments" in document
        else ""
    )
    warned = document.get("warnings") or []
    said = f" The run warned: {'; '.join(warned)}." if warned else ""
    return "Source: " + ", ".join(parts) + "." + command + said


def embedded(name: str) -> bool:
    return (ROOT / "hybridstate" / "models" / name / "config.json").exists()


def trained(result: dict[str, Any]) -> bool:
    """Whether a recorded calibration is of a trained model."""
    return not result.get("synthetic", False)


def synthetic(result: dict[str, Any]) -> bool:
    return not trained(result)


def anything(_: dict[str, Any]) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Run:
    """One result of a model, and the files that hold it."""

    name: str
    result: dict[str, Any]
    files: tuple[tuple[Path, dict[str, Any]], ...]

    @property
    def titled(self) -> bool:
        """Whether it is about one model, and not about a whole file's worth of them."""
        return self.name != self.files[0][0].stem


def runs(
    pattern: str,
    wanted: Callable[[dict[str, Any]], bool] = anything,
    merge: Merge | None = None,
) -> Iterator[Run]:
    """A run for every file, or for every model where `merge` can join its recordings.

    Args:
        merge: one result of two; raises ValueError where they do not belong together.
    """
    found = [
        Run(model_name(path, document), document["result"], ((path, document),))
        for path, document in recorded(pattern)
        if wanted(document["result"])
    ]
    while found:
        first = found.pop(0)
        for other in [run for run in found if merge and run.name == first.name]:
            assert merge is not None
            try:
                joined = merge([first.result, other.result])
            except ValueError:
                continue
            first = Run(first.name, joined, (*first.files, *other.files))
            found.remove(other)
        yield first


def filled(text: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    """A page with every generated block written anew."""

    def fill(match: re.Match[str]) -> str:
        body = blocks[match["name"]]()
        return match["head"] + (f"\n{body}\n\n" if body else "") + match["tail"]

    return BLOCK.sub(fill, text)
