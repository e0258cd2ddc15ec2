"""The `hybridstate` command. Verbs live in one module each, with `register(app)`."""

import importlib
import os
import sys
from contextlib import suppress
from typing import Annotated, Any, Final

import typer

from hybridstate import __version__

VERBS: Final = (
    "inspect",
    "analyze",
    "calibrate",
    "export_plan",
    "plan",
    "verify",
    "bench",
    "doctor",
)
"""Modules of `hybridstate.cli`, in the order of `--help`. None imports torch or NumPy at the top."""

app = typer.Typer(
    name="hybridstate",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=(
        "Example: hybridstate analyze tiny-kda\n\n"
        "Exit codes: 0 ok, 1 bug, 2 usage, 3 model cannot be read, 4 model not supported, "
        "5 invalid numbers, 6 plan does not fit, 7 missing hardware or package, 130 interrupted."
    ),
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"hybridstate {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
    no_color: Annotated[
        bool, typer.Option("--no-color", help="No colours (as NO_COLOR does).")
    ] = False,
) -> None:
    """Which parts of a hybrid model's recurrent state to keep, and at which precision.

    From a checkpoint of a linear-attention model to a measured compression plan.
    """
    if no_color:
        os.environ["NO_COLOR"] = "1"


def _register_verbs() -> None:
    for verb in VERBS:
        importlib.import_module(f"hybridstate.cli.{verb}").register(app)


_register_verbs()


def main() -> None:
    """Entry point of the console script: run, and report unparsable command lines in one line."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller (`>&-`)
            null = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
            setattr(sys, name, null)
        reconfigure: Any = getattr(getattr(sys, name), "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    arguments = sys.argv[1:]
    try:
        if empty := _empty_option(arguments):
            from hybridstate.cli.output import usage_failure

            hint = "a variable of the shell may be unset; leave the option out for its default"
            usage_failure("", f"{empty} is empty", hint, json="--json" in arguments)
            sys.exit(2)
        code = app(args=arguments, prog_name="hybridstate", standalone_mode=False)
        sys.stdout.flush()
    except (typer.Abort, KeyboardInterrupt):
        code = _interrupted(arguments)
    except SystemExit as stop:  # typer's answer to a reader that has seen enough
        code = 0 if isinstance(stop.__context__, BrokenPipeError) else stop.code
    except OSError as error:
        code = _unprintable(error)
    except Exception as error:
        code = _usage(error, arguments)
    sys.exit(code if isinstance(code, int) else 0)


def _empty_option(arguments: list[str]) -> str | None:
    """An option whose value is no text at all: as a path it would be the current folder."""
    for before, argument in zip(["", *arguments], arguments, strict=False):
        name, equals, value = argument.partition("=")
        if argument == "" and before.startswith("-"):
            return before
        if name.startswith("--") and equals and not value:
            return name
    return None


def _interrupted(arguments: list[str]) -> int:
    """Exit code of Ctrl-C before a command had begun."""
    from hybridstate.cli.output import interrupted

    interrupted(json="--json" in arguments)
    return 130


def _unprintable(error: OSError) -> int:
    """Exit code where help or version cannot be printed."""
    from hybridstate.cli.output import silence_stdout

    silence_stdout()
    if isinstance(error, BrokenPipeError):
        return 0
    with suppress(OSError):
        typer.echo(f"error: cannot write to standard output: {error.strerror}", err=True)
    return 2


def _usage(error: Exception, arguments: list[str]) -> int:
    """Exit code of typer's own errors, after telling the user; anything else is re-raised."""
    describe: Any = getattr(error, "format_message", None)
    if describe is None:
        raise error
    message = describe()
    if "--json" not in arguments and "\n" in message:  # a bare group, answered with its help
        show: Any = getattr(error, "show", None)
        with suppress(OSError):
            show()
    else:
        from hybridstate.cli.output import usage_failure

        context: Any = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "hybridstate"
        verb = path.removeprefix("hybridstate").strip()
        known = getattr(getattr(context, "command", None), "commands", {})
        later = next((name for name in arguments if name in known), None)
        hint = f"see {path} --help"
        if later is not None:
            hint = f"the command comes first: {path} {later} ..."
        usage_failure(verb, message, hint, json="--json" in arguments)
    return int(getattr(error, "exit_code", 2))
