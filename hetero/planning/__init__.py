"""Where each chunk's state lives: pure functions from sizes and budgets to a Placement, and what
its step is predicted to take."""
