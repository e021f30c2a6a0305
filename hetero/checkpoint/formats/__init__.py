"""Checkpoints in any format that hetero reads, opened without a model."""
