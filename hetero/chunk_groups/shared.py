"""What all chunk groups of an engine share."""

from __future__ import annotations

from dataclasses import dataclass

from hetero.activations.limits import ActivationLimits
from hetero.config import Config
from hetero.state.loss_scale import LossScale
from hetero.state.memory.state_files import StateFiles
from hetero.state.unmanaged_params import UnmanagedParams
from offload.device.backend import Backend
from offload.memory.ledger import Ledger
from offload.memory.process_memory import ProcessExcess


@dataclass(frozen=True)
class Shared:
    """What all chunk groups of an engine share.

    `notes` are lines for the user, to append to; `unmanaged` charges what no chunk group has;
    `state_files` those of a durable state, else None;
    `activations` what is left to activations, or None if autograd keeps them; `excess` by how much
    the process is too large, or None if it has no limit.
    """

    config: Config
    backend: Backend
    ledger: Ledger
    notes: list[str]
    loss_scale: LossScale
    unmanaged: UnmanagedParams
    state_files: StateFiles | None = None
    activations: ActivationLimits | None = None
    excess: ProcessExcess | None = None
