"""The command line: `culm`, and `python -m culm`."""

import sys


def main() -> None:
    """Run the command. Ctrl-C may come before there is anybody to heed it."""
    try:
        from culm.cli import main as run
    except (KeyboardInterrupt, ImportError) as error:
        # An extension module that is interrupted in its import says that it can not be imported.
        if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):
            print("culm: interrupted", file=sys.stderr)
            sys.exit(130)
        raise
    run()


if __name__ == "__main__":
    main()
