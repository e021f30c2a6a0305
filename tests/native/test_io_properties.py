"""native/io_engine: random sequences of calls against a model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import _native
from tests.io_tools import KINDS, Memory, add_file


@settings(max_examples=20, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("any_kind", KINDS)
def test_file_behaves_like_bytes(any_kind, tmp_path_factory, data):
    size = 5 * 4096
    model = bytearray(size)
    memory = Memory(size)
    engine = _native.IoEngine(any_kind, queue_depth=3, block_bytes=4096)
    file = add_file(engine, tmp_path_factory.getbasetemp(), size)
    for step in range(data.draw(st.integers(1, 8))):
        offset = data.draw(st.integers(0, size - 1))
        nbytes = data.draw(st.integers(0, size - offset))
        if data.draw(st.booleans()):
            memory.bytes.fill_(step + 1)
            engine.write(file, memory.address, nbytes, offset).wait()
            model[offset : offset + nbytes] = bytes([step + 1]) * nbytes
        else:
            engine.read(file, memory.address, nbytes, offset).wait()
            got = bytes(memory.bytes[:nbytes].tolist())
            assert got == bytes(model[offset : offset + nbytes])
    engine.close()
