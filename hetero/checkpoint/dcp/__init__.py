"""Checkpoints of torch.distributed.checkpoint (DCP), written and read by its own protocol."""
