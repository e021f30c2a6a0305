"""What several benchmarks train and measure."""
