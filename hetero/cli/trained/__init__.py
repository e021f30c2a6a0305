"""The model that a run leaves, and text that it makes."""
