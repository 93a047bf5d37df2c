"""`python -m culm`: the command line."""

from culm.cli import main

main()
