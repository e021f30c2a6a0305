"""native/stripe_map and files of several members."""

import errno
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload import _native
from tests.support.native.io_tools import BLOCK, Memory, Striped, add_file
from tests.support.own_process import descriptors

WEIGHTS = st.lists(st.integers(1, 9), min_size=1, max_size=5)
UNITS = st.sampled_from([4096, 8192, 12288, 1 << 20])
OFFSETS = st.integers(0, 1 << 45)


@given(WEIGHTS, UNITS, OFFSETS)
def test_a_members_bytes_follow_one_another(weights, unit, offset):
    stripes = _native.StripeMap(weights, unit)
    member, member_offset, run = stripes.place(offset)
    assert stripes.member_bytes(member, offset) == member_offset
    assert run > 0
    # The run is contiguous in both, and a run of several members ends with a unit.
    last = offset + min(run, 1 << 40) - 1
    assert stripes.place(last)[:2] == (member, member_offset + last - offset)
    if len(weights) > 1:
        assert (offset + run) % unit == 0
        assert run <= unit * sum(weights)


@given(WEIGHTS)
def test_the_pattern_is_spread_evenly(weights):
    pattern = _native.StripeMap(weights, 4096).pattern
    places = sum(weights)
    assert [pattern.count(m) for m in range(len(weights))] == weights
    # At no point is a member a whole round of the others away from its share.
    for member, weight in enumerate(weights):
        for end in range(places + 1):
            assert abs(pattern[:end].count(member) - end * weight / places) < len(weights)


def test_one_member_is_a_plain_file():
    stripes = _native.StripeMap([7], 4096)
    assert stripes.place(12345)[:2] == (0, 12345)
    assert stripes.place(12345)[2] > 1 << 62
    assert stripes.member_bytes(0, 99999) == 99999


@pytest.mark.parametrize(
    ("weights", "unit"),
    [([], 4096), ([1, 0], 4096), ([4097], 4096), ([1], 0), ([1], 100), ([1], 2 << 30)],
)
def test_what_is_no_map_is_refused(weights, unit):
    with pytest.raises(ValueError, match="stripe map needs|unit_bytes must be"):
        _native.StripeMap(weights, unit)


@pytest.mark.covering(1)
@pytest.mark.parametrize("weights", [[1, 1], [3, 1], [1, 2, 5]])
def test_blocks_are_cut_between_members_only(engine, tmp_path, weights):
    # Units of a quarter block: neighbours of one member are one transfer, as far as a block goes.
    size = 64 * BLOCK
    striped = Striped(engine, tmp_path, weights, BLOCK // 4, size, direct=True)
    memory = Memory(size)
    want = memory.randomise()
    engine.write(striped.file, memory.address, size, 0).wait()
    runs = 0
    offset = 0
    while offset < size:
        run = min(striped.stripes.place(offset)[2], size - offset)
        runs += -(-run // BLOCK)
        offset += run
    assert engine.stats["writes"] == runs
    memory.bytes.zero_()
    engine.read(striped.file, memory.address, size, 0).wait()
    assert torch.equal(memory.bytes, want)
    striped.close()


@pytest.mark.covering(1)
@pytest.mark.parametrize("op", ["read", "write"])
def test_an_error_names_the_member_and_the_offset_in_it(engine, tmp_path, op):
    size = 8 * 4096
    striped = Striped(engine, tmp_path, [1, 1], nbytes=size)
    memory = Memory(size)
    start = getattr(engine, op)
    engine.inject(op, 0, error=errno.EIO)
    with pytest.raises(_native.NativeIoError) as caught:
        # One unit, the sixth: the third of the second member.
        start(striped.file, memory.address, 4096, 5 * 4096).wait()
    assert caught.value.errno == errno.EIO
    assert caught.value.filename == f"{tmp_path}/member1"
    assert caught.value.offset == 2 * 4096
    assert f"{op} of 4096 bytes at offset 8192 of {tmp_path}/member1" in str(caught.value)
    start(striped.file, memory.address, size, 0).wait()
    striped.close()


def test_members_that_cannot_be_added_leave_nothing(engine, tmp_path):
    before = descriptors()
    fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR, 0o600)
    with pytest.raises(OSError, match="cannot add file gone"):
        engine.add_striped_file([(fd, "a"), (-1, "gone")], _native.StripeMap([1, 1], 4096))
    with pytest.raises(ValueError, match="for 2 members, not 1"):
        engine.add_striped_file([(fd, "a")], _native.StripeMap([1, 1], 4096))
    os.close(fd)
    assert descriptors() == before
    # The engine works on.
    memory = Memory(4096)
    engine.read(add_file(engine, tmp_path, 4096), memory.address, 4096, 0).wait()
