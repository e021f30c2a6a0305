"""The memory of a chunk group: homes, slots and file; parameters, gradients, optimizer state."""
