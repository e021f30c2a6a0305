"""The words that everything else is named by: tiers, state kinds, accounts (docs/glossary.md)."""

from __future__ import annotations

import enum


class Tier(enum.Enum):
    """A kind of memory."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Account(enum.Enum):
    """What managed bytes are used for; the ledger is kept per tier and account."""

    PARAM = "param"  # homes
    GRAD = "grad"
    OPTIM_STATE = "optim_state"
    GATHERED = "gathered"  # slots for gathered copies
    SHARD = "shard"  # slots for DISK-homed shards of parameters, on their way to ranks
    BUCKET = "bucket"  # whole gradients, of this rank and from others, while they are averaged
    GRAD_SLOT = "grad_slot"  # slots for DISK-homed gradients on their way
    BUFFER = "buffer"  # the optimizer pipeline's buffers
    LINK = "link"  # buffers for what is on its way between DEVICE and RAM
    FILE = "file"  # the file of all DISK homes
    ACTIVATION = "activation"  # what autograd saved for backward
    INIT = "init"  # parameters under construction, in their construction dtype
    UNMANAGED = "unmanaged"  # parameters of integers, bools and complex numbers, which never move


class StateKind(enum.Enum):
    """The kinds of state of a chunk, each with a home; the values are Placement's field names."""

    PARAM = "param"
    GRAD = "grad"
    OPTIM_STATE = "optim_state"
