"""Folders of Hugging Face's: loaded into a managed model, and exported from it."""
