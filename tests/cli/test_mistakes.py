"""What a newcomer types wrong: one line that says what, and a hint that says what to do."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hybridstate.cli import main
from hybridstate.cli.main import app


@pytest.mark.parametrize(
    ("given", "code", "said", "hint"),
    [
        ("analyze tiny-gdn", 3, "has no config.json, and its name hides the embedded model tiny-gdn",
         "rename the folder, or work in another one"),
        ("analyze tiny-kda -o out.json", 2, "out.json would be a folder", "--json prints the result"),
        ("calibrate tiny-kda -o out.json", 2, "out.json would be a folder", "name a folder"),
        ("export-plan tiny-kda --w-max 64 -o out.json", 2, "out.json would be a folder", "name a folder"),
        ("export-plan tiny-kda -o out --policy empty.json", 3, "empty.json: no 'variant'",
         "as Model-Optimizer or `hybridstate plan policy` writes it"),
        ("bench quality tiny-kda --tasks nope", 2, "--tasks 'nope' is not known", "choose from own, ruler, recall"),
        ("bench quality tiny-kda --boundary end", 2, "'end' is not known", "choose from prompt, question"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_what_to_do(
    given: str, code: int, said: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.json").write_text("{}")
    Path("tiny-gdn").mkdir()
    done = CliRunner().invoke(app, given.split())
    assert done.exit_code == code, done.output
    errors = " ".join(done.stderr.split())
    assert said in errors
    assert hint in errors
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty.json", "tiny-gdn"]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("tiny-kda inspect", "the command comes first: hybridstate inspect ..."),
        ("--headers inspect tiny-kda", "the command comes first: hybridstate inspect ..."),
        ("bench tiny-kda update", "the command comes first: hybridstate bench update ..."),
        ("analyse tiny-kda", "see hybridstate --help"),
    ],
)
def test_a_command_behind_its_argument_is_found(
    arguments: str,
    hint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["hybridstate", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    assert f"hint: {hint}" in capsys.readouterr().err


def test_options_that_are_refused_say_nothing_of_stages() -> None:
    done = CliRunner().invoke(app, ["calibrate", "tiny-kda", "--profile", "fast"])
    assert done.exit_code == 2
    assert "until then" not in done.stderr
