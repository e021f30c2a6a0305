"""Measurements: every script runs as `python -m bench.NAME`, has --json and can run its peers."""
