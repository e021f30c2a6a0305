"""Where each chunk's state lives: pure functions from sizes, budgets and a trace to a Placement."""
