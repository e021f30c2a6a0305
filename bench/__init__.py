"""Benchmarks: each module here is a program, `python -m bench.NAME`, with --json and --help."""
