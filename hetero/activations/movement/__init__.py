"""How activations leave the memory that computes, and come back."""
