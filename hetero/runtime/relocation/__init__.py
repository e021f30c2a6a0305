"""Moving homes between steps, when budgets change."""
