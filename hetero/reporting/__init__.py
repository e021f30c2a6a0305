"""What a training run did, recorded step by step and shown on one page."""
