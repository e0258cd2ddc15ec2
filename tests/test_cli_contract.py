"""What scripts may rely on: light start, exit codes, one JSON document, plain text when asked.

The real program runs as its own process; nothing here reaches into the package.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import write_checkpoint, write_safetensors

HEAVY = ("torch", "transformers", "matplotlib", "triton")

COMMANDS = (
    (),
    ("inspect",),
    ("analyze",),
    ("calibrate",),
    ("export-plan",),
    ("plan",),
    ("plan", "show"),
    ("plan", "validate"),
    ("plan", "diff"),
    ("plan", "verify"),
    ("plan", "policy"),
    ("verify",),
    ("bench",),
    ("bench", "update"),
    ("bench", "decode"),
    ("bench", "restore"),
    ("bench", "serve"),
    ("bench", "simulate"),
    ("doctor",),
)

WATCHED = """
import sys
from hybridstate.cli.main import main
code = 0
try:
    main()
except SystemExit as stop:
    code = stop.code or 0
loaded = [m for m in {heavy!r} if m in sys.modules]
print("LOADED", *loaded, file=sys.stderr)
sys.exit(code)
"""


@dataclass(frozen=True)
class Run:
    """One finished command."""

    code: int
    stdout: str
    stderr: str

    def document(self) -> dict[str, Any]:
        """stdout as exactly one JSON document, without NaN or infinity."""

        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} in JSON output")

        document = json.loads(self.stdout, parse_constant=refuse)
        assert isinstance(document, dict)
        return document


def run(*args: str | Path, cwd: Path | None = None, **environment: str) -> Run:
    """Run `hybridstate ARGS` in its own process, both streams piped."""
    return _execute([sys.executable, "-m", "hybridstate", *map(str, args)], cwd, environment)


def _execute(command: list[str], cwd: Path | None, environment: dict[str, str]) -> Run:
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    done = subprocess.run(
        command, cwd=cwd, env=env | environment, capture_output=True, text=True, timeout=120
    )
    return Run(done.returncode, done.stdout, done.stderr)


# --- start-up ------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join(c) or "top")
def test_help_loads_no_heavy_library(command: tuple[str, ...]) -> None:
    code = WATCHED.format(heavy=HEAVY)
    result = _execute([sys.executable, "-c", code, *command, "--help"], None, {})
    assert result.code == 0, result.stderr
    assert result.stderr.splitlines()[-1] == "LOADED"
    assert "Usage: hybridstate" in result.stdout


def test_analyze_loads_no_heavy_library(tiny_kda: Path) -> None:
    code = WATCHED.format(heavy=HEAVY)
    result = _execute([sys.executable, "-c", code, "analyze", str(tiny_kda)], None, {})
    assert result.code == 0, result.stderr
    assert result.stderr.splitlines()[-1] == "LOADED"


def _best_seconds(command: list[str]) -> float:
    samples = []
    for _ in range(3):
        start = time.perf_counter()
        result = _execute(command, None, {})
        samples.append(time.perf_counter() - start)
        assert result.code == 0, result.stderr
    return min(samples)


def test_analyze_of_an_embedded_model_takes_under_two_seconds() -> None:
    """On a quiet machine; on a busy one the allowance grows with the cost of bare imports."""
    imports = "import numpy, typer, rich.table, pydantic"
    yardstick = _best_seconds([sys.executable, "-c", imports])
    seconds = _best_seconds([sys.executable, "-m", "hybridstate", "analyze", "tiny-kda", "--json"])
    assert seconds < max(2.0, 4 * yardstick)


# --- one JSON document ------------------------------------------------------------------------------


def test_analyze_prints_exactly_one_document(tiny_gdn: Path) -> None:
    result = run("analyze", tiny_gdn, "--json")
    assert result.code == 0, result.stderr
    document = result.document()
    assert document["ok"] is True
    assert document["command"] == "analyze"
    assert document["model"] == str(tiny_gdn)
    assert set(document) >= {"schema", "ok", "command", "model", "result", "warnings", "timing"}


def test_human_output_keeps_results_and_remarks_apart(tiny_gdn: Path) -> None:
    plain = run("analyze", tiny_gdn)
    quiet = run("analyze", tiny_gdn, "--quiet")
    assert plain.code == quiet.code == 0
    assert plain.stdout == quiet.stdout
    assert plain.stdout.strip()


def test_doctor_prints_exactly_one_document() -> None:
    result = run("doctor", "--json")
    assert result.code == 0, result.stderr
    assert result.document()["command"] == "doctor"


# --- exit codes --------------------------------------------------------------------------------------


def _nothing(folder: Path) -> list[str | Path]:
    return ["analyze", folder / "nowhere"]


def _hub_id(folder: Path) -> list[str | Path]:
    return ["calibrate", "moonshotai/Kimi-Linear-48B-A3B-Instruct", "-o", folder / "out"]


def _truncated(folder: Path) -> list[str | Path]:
    model = write_checkpoint(folder / "truncated", "qwen3_5")
    shard = model / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    return ["analyze", model]


def _missing_shard(folder: Path) -> list[str | Path]:
    model = write_checkpoint(folder / "missing", "kimi_linear", shards=3)
    (model / "model-00001-of-00003.safetensors").unlink()
    return ["analyze", model]


def _no_linear_layer(folder: Path) -> list[str | Path]:
    model = folder / "dense"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 1}')
    weight = np.zeros((4, 4), np.float32)
    write_safetensors(
        model / "model.safetensors", {"model.layers.0.self_attn.q_proj.weight": ("F32", weight)}
    )
    return ["analyze", model]


def _nan_decay(folder: Path) -> list[str | Path]:
    from safetensors.torch import load_file, save_file

    model = write_checkpoint(folder / "nan", "kimi_linear")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.self_attn.dt_bias"][5] = float("nan")
    save_file(tensors, model / "model.safetensors")
    return ["analyze", model]


def _occupied_output(folder: Path) -> list[str | Path]:
    model = write_checkpoint(folder / "model", "qwen3_5")
    (folder / "out").mkdir()
    (folder / "out" / "precious.txt").write_text("mine")
    return ["export-plan", model, "--w-max", "64", "-o", folder / "out"]


def _small_cutoff(folder: Path) -> list[str | Path]:
    return ["analyze", write_checkpoint(folder / "model", "qwen3_5"), "--w-max", "3"]


def _unknown_option(folder: Path) -> list[str | Path]:
    return ["analyze", "tiny-kda", "--no-such-option"]


def _foreign_plan(folder: Path) -> list[str | Path]:
    model = write_checkpoint(folder / "one", "qwen3_5", seed=1)
    other = write_checkpoint(folder / "two", "qwen3_5", seed=2)
    plan = folder / "plan"
    made = run("export-plan", model, "--w-max", "64", "-o", plan)
    assert made.code == 0, made.stderr
    return ["plan", "verify", plan, other]


def _gpu_request(folder: Path) -> list[str | Path]:
    model = write_checkpoint(folder / "model", "kimi_linear", tokenizer=True)
    return ["bench", "update", model, "--device", "cuda"]


FAILURES = [
    pytest.param(*case, id=case[2].__name__.lstrip("_"))
    for case in (
        (2, "usage", _unknown_option, "--no-such-option"),
        (2, "usage", _occupied_output, "out"),
        (2, "usage", _small_cutoff, "4"),
        (3, "cannot-read-model", _nothing, "nowhere"),
        (3, "cannot-read-model", _hub_id, "hf download"),
        (3, "cannot-read-model", _truncated, "model.safetensors"),
        (3, "cannot-read-model", _missing_shard, "model-00001-of-00003.safetensors"),
        (4, "unsupported-model", _no_linear_layer, "llama"),
        (5, "invalid-numbers", _nan_decay, "model.layers.1.self_attn.dt_bias"),
        (6, "plan-mismatch", _foreign_plan, ""),
        (7, "missing-requirement", _gpu_request, "cuda"),
    )
    if not (case[0] == 7 and torch.cuda.is_available())  # there is a GPU to request
]


@pytest.mark.parametrize(("exit_code", "error_code", "prepare", "mentions"), FAILURES)
def test_failure_has_its_exit_code_and_one_clear_line(
    exit_code: int,
    error_code: str,
    prepare: Callable[[Path], list[str | Path]],
    mentions: str,
    tmp_path: Path,
) -> None:
    command = prepare(tmp_path)
    before = _listing(tmp_path)
    human = run(*command)
    machine = run(*command, "--json")

    assert (human.code, machine.code) == (exit_code, exit_code), human.stderr
    assert human.stdout == ""
    assert "Traceback" not in human.stderr + machine.stderr
    document = machine.document()
    assert document["ok"] is False
    error = document["error"]
    assert error["code"] == error_code
    assert "\n" not in error["message"]
    shown = human.stderr + (error["hint"] or "")
    assert mentions.lower() in shown.lower()
    assert _listing(tmp_path) == before, "a failed command leaves nothing behind"


def _listing(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_plan_verbs_load_no_heavy_library(tiny_gdn: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    made = run("export-plan", tiny_gdn, "--w-max", "64", "-o", plan)
    assert made.code == 0, made.stderr
    code = WATCHED.format(heavy=HEAVY)
    for verb, rest in (("show", []), ("validate", []), ("diff", [plan]), ("verify", [tiny_gdn])):
        command = [sys.executable, "-c", code, "plan", verb, str(plan), *map(str, rest)]
        result = _execute(command, None, {})
        assert result.code == 0, result.stderr
        assert result.stderr.splitlines()[-1] == "LOADED", verb


# --- terminals ---------------------------------------------------------------------------------------


def test_piped_output_has_no_escape_codes(tiny_gdn: Path) -> None:
    result = run("analyze", tiny_gdn)
    assert "\x1b" not in result.stdout + result.stderr


@pytest.mark.parametrize("plain", ["NO_COLOR", "--no-color"])
def test_colour_can_be_turned_off_on_a_terminal(plain: str, tiny_gdn: Path) -> None:
    script = shutil.which("script")
    if script is None:
        pytest.skip("the `script` program gives the pseudo-terminal")
    arguments = ["--no-color"] if plain == "--no-color" else []
    line = " ".join([sys.executable, "-m", "hybridstate", *arguments, "analyze", str(tiny_gdn)])
    environment = {"TERM": "xterm-256color", "COLUMNS": "120"}
    if plain == "NO_COLOR":
        environment["NO_COLOR"] = "1"
    result = _execute([script, "-qec", line, "/dev/null"], None, environment)
    assert result.code == 0, result.stdout
    assert "\x1b[" not in result.stdout  # neither colours nor bold and dim


def test_narrow_output_loses_nothing(tiny_gdn: Path) -> None:
    wide = run("analyze", tiny_gdn)
    narrow = run("analyze", tiny_gdn, COLUMNS="40")
    assert narrow.code == 0
    assert "…" not in narrow.stdout

    def numbers(text: str) -> set[str]:
        return {word for word in text.split() if any(c.isdigit() for c in word)}

    assert numbers(wide.stdout) <= numbers(narrow.stdout)


# --- streams that end early --------------------------------------------------------------------------


def _shell(line: str) -> Run:
    program = f'"{sys.executable}" -m hybridstate'
    return _execute(["bash", "-c", line.replace("hybridstate", program, 1)], None, {})


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("hybridstate analyze tiny-kda | true; exit ${PIPESTATUS[0]}", 0),
        ("hybridstate analyze tiny-kda --json | true; exit ${PIPESTATUS[0]}", 0),
        ("hybridstate analyze --help | true; exit ${PIPESTATUS[0]}", 0),
        ("hybridstate analyze tiny-kda >&-", 0),
        ("hybridstate analyze tiny-kda >&- 2>&-", 0),
        ("hybridstate analyze nowhere 2>&1 >/dev/null | true; exit ${PIPESTATUS[0]}", 3),
        ("hybridstate analyze tiny-kda >/dev/full", 2),
        ("hybridstate analyze tiny-kda --json >/dev/full", 2),
        ("hybridstate analyze nowhere --json >/dev/full", 3),
        ("hybridstate --help >/dev/full", 2),
        ("hybridstate analyze tiny-kda 2>/dev/full", 0),
    ],
)
def test_stream_that_ends_early_is_no_bug(line: str, code: int) -> None:
    result = _shell(line)
    assert result.code == code, result.stderr
    assert "Traceback" not in result.stderr
    assert "bug" not in result.stderr


@pytest.mark.skipif(os.name == "nt", reason="needs a pipe that breaks")
def test_unread_remarks_do_not_stop_the_work(tiny_gdn: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    done = _shell(f"hybridstate analyze {tiny_gdn} -o {target} 2>&1 >/dev/null | true")
    assert done.code == 0
    assert (target / "analysis.json").exists()


def test_unparsable_command_line_is_one_line_and_a_hint() -> None:
    result = run("analyze")
    assert result.code == 2
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        "error: Missing argument 'MODEL'.",
        "hint: see hybridstate analyze --help",
    ]


@pytest.mark.parametrize("arguments", [["-o", ""], ["--output="], ["--report", ""], ["--text", ""]])
def test_an_empty_value_is_not_the_current_folder(
    arguments: list[str], tiny_gdn: Path, tmp_path: Path
) -> None:
    """`-o "$OUT"` with OUT unset would write into wherever the shell is."""
    done = run("analyze", tiny_gdn, *arguments, "--json", cwd=tmp_path)
    option = arguments[0].rstrip("=")
    assert done.code == 2
    assert done.document()["error"]["message"] == f"{option} is empty"
    assert f"error: {option} is empty" in done.stderr
    assert list(tmp_path.iterdir()) == []
