"""What is shown of a training run: its progress, the table at its end, its figures."""
