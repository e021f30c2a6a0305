"""Training steps of many ranks on paper and in simulation."""
