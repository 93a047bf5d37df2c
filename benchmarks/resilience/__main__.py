"""`python -m benchmarks.resilience`: run `culm bench resilience`, or some of its parts."""

from benchmarks.resilience.resilience_bench import main

if __name__ == "__main__":
    main()
