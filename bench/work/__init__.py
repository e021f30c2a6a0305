"""The work that is measured: transfers, updates, an optimizer step, a model's passes."""
