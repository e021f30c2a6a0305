"""Where offloading a block's activations costs as much as computing them again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """A transformer's block, as it was measured.

    Attributes:
        width: elements of a hidden state.
        seq_len: tokens of a sequence.
        forward_s: seconds of its forward, of the whole batch.
        nbytes: what offloading its activations moves, written and read, beyond what recomputing
            them keeps.
    """

    width: int
    seq_len: int
    forward_s: float
    nbytes: float


@dataclass(frozen=True)
class Crossing:
    """
    Attributes:
        block_gbps: NVMe's rate at which the block's bytes take as long as its forward.
        step_gbps: NVMe's rate at which a step with all offloaded takes as long as one with all
            recomputed, if NVMe and compute hide each other and recomputing moves little.
        seq_len: tokens of a sequence from which on the block's bytes take less time than its
            forward, at the measured rate: 0 if always.
    """

    block_gbps: float
    step_gbps: float
    seq_len: float


def crossing(
    block: Block, layers: int, compute_s: float, state_bytes: float, nvme_gbps: float
) -> Crossing:
    """Of a model of `layers` such blocks.

    A token of a block takes 24 w^2 operations in products with weights and 2 s w in causal
    attention (width w, sequences of s), so forward's seconds of a token are in proportion to
    12 w + s. Its bytes are the same for all s.

    Args:
        block: one block.
        layers: how many there are.
        compute_s: seconds of a step's computing, without computing anything again.
        state_bytes: of a step, which it moves anyway.
        nvme_gbps: NVMe's measured rate.
    """
    block_gbps = block.nbytes / block.forward_s / 1e9
    step_bytes = state_bytes + layers * block.nbytes
    step_gbps = step_bytes / (compute_s + layers * block.forward_s) / 1e9
    # forward_s x (12 w + s) / (12 w + seq_len) = nbytes / rate, for the tokens of seq_len
    operations = 12 * block.width
    seq_len = block_gbps / nvme_gbps * (operations + block.seq_len) - operations
    return Crossing(block_gbps, step_gbps, max(0.0, seq_len))
