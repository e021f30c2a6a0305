"""One training step, in the order in which it happens."""
