"""Moving homes between steps, when budgets or measurements change."""
