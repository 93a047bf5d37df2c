"""The command line: `culm`, and `python -m culm`."""

import sys


def main() -> None:
    """Run the command. Ctrl-C during the imports ends it with a sentence, too."""
    try:
        from culm.cli import main as run
    except (KeyboardInterrupt, ImportError) as error:
        # An extension module whose import is interrupted raises ImportError.
        if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):
            print("culm: interrupted", file=sys.stderr)
            sys.exit(130)
        raise
    run()


if __name__ == "__main__":
    main()
