"""Benchmarks: `python -m benchmarks.NAME [--json FILE]` prints a table; every ratio is taken within one run."""
