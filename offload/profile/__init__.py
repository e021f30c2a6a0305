"""What a machine moves and computes per second, and what each resource did when."""
