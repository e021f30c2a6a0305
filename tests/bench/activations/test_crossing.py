"""bench/activations/crossing.py: the rate and the length at which both cost the same."""

from __future__ import annotations

import pytest

from bench.activations.crossing import Block, crossing


def test_at_the_rate_and_length_found_both_take_the_same_time() -> None:
    block = Block(width=1024, seq_len=4096, forward_s=0.25, nbytes=0.5e9)
    found = crossing(block, layers=24, compute_s=30.0, state_bytes=6e9, nvme_gbps=1.6)
    assert found.block_gbps == 2.0
    assert block.nbytes / (found.block_gbps * 1e9) == block.forward_s
    assert found.step_gbps == pytest.approx(18 / (30 + 24 * 0.25))
    # A token's bytes at the measured rate, and its forward at the length found.
    per_token_s = block.nbytes / block.seq_len / 1.6e9
    operations = (12 * 1024 + found.seq_len) / (12 * 1024 + 4096)
    assert operations * block.forward_s / block.seq_len == pytest.approx(per_token_s)
    assert found.seq_len > 4096  # the disk is slower than the rate of a block


def test_a_fast_disk_is_quicker_at_any_length() -> None:
    block = Block(width=64, seq_len=32, forward_s=0.25, nbytes=1e6)
    assert crossing(block, 2, 1.0, 2e6, nvme_gbps=4.0).seq_len == 0
