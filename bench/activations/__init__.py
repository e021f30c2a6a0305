"""Steps whose saved tensors do not fit, beside plain PyTorch's ways to save memory."""
