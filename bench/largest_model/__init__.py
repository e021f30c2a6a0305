"""The search for the largest model that trains within a memory budget, for bench.ladder."""
