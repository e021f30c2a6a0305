"""What all benchmarks have: options, headers, rounds in turns, peers and ranks as processes."""
