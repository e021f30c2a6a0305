"""RAM: tiers, the ledger of budgets, arenas of equal slots."""
