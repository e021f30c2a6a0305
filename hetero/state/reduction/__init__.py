"""Gradients of one rank on their way to the mean over all ranks."""
