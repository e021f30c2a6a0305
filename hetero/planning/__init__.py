"""Where each chunk's state lives: pure functions from sizes, budgets, a profile and a trace to a Placement."""
