"""What user code has in its hands while values are elsewhere: parameters and tensors that fetch."""
