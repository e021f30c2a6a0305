"""A scratch file with its ledger."""

import pytest

from offload.disk.scratch_file import ScratchFile
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account, Tier

MIB = 1 << 20


@pytest.fixture
def ledger():
    return Ledger({Tier.DISK: 8 * MIB})


@pytest.fixture
def scratch(tmp_path, ledger):
    made = ScratchFile(str(tmp_path), ledger, Account.OPTIM_STATE)
    yield made
    made.close()
