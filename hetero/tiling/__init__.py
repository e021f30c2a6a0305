"""Layers and losses computed in parts, so that no whole layer and no whole logits are in memory."""
