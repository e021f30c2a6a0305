"""The same training with plain PyTorch, DDP, FSDP2 and DeepSpeed, each a program."""
