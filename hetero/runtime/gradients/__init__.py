"""The path of a gradient from autograd, or from the user, to the chunk group that keeps it."""
