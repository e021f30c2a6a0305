"""Layers and losses in tiles beside whole ones: memory and time."""
