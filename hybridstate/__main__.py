"""`python -m hybridstate`, and the console script."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is still being imported ends quietly."""
    try:
        from hybridstate.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
