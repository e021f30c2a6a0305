"""Embeddings, and the heads that have their weights, by rows: each part is a parameter."""
