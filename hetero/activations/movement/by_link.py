"""Compute happens on a device with memory of its own: what leaves is in RAM, then in the file."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from hetero.activations.activation import Activation, ActivationState
from hetero.activations.handed_out import HandedOut
from hetero.activations.kept_tensors import KeptTensors
from hetero.activations.limits import ActivationLimits
from hetero.activations.movement.activation_file import ActivationFile
from hetero.activations.movement.device_copies import DeviceCopies
from hetero.activations.movement.movement import MOST_LOOKED_AT, Movement, _exact
from hetero.activations.movement.ram_copies import RamCopies
from offload import timeline
from offload.device.backend import Backend
from offload.memory.operation import Transfer, wait_quietly
from offload.memory.run_pool import Run

# Half of the device's share is for tensors, half for slots to which activations come back.
KEPT_SHARE = 2


@dataclass(frozen=True)
class _Ending:
    """A copy to RAM that nobody needs, and the slots that are free when it is done."""

    op: Transfer
    run: Run


class ByLink(Movement):
    """Saved tensors are copied to RAM over the link, and back to slots of the device.

    Half of the tensors' share is kept before any leaves; the other half is for those that are on
    their way. A tensor that is asked for before its copy is done is used as it is.
    """

    def __init__(
        self,
        limits: ActivationLimits,
        kept: KeptTensors,
        ram: RamCopies,
        file: ActivationFile | None,
        reads_ahead: bool,
        backend: Backend,
        devices: DeviceCopies,
    ) -> None:
        """As Movement; `devices` has the slots of `backend`."""
        super().__init__(limits, kept, ram, file, reads_ahead)
        self._backend = backend
        self._devices = devices
        self._leaving: deque[Activation] = deque()
        self._leaving_bytes = 0
        self._ending: list[_Ending] = []
        self._left_bytes = 0  # asked for

    def kept_limit(self, largest_bytes: int) -> int:
        return self._limits.device_bytes // KEPT_SHARE

    @property
    def fixed_bytes(self) -> int:
        return self._ram.pool.charged_bytes

    def staying_limit(self, limit: int) -> int:
        return limit // 2

    @property
    def staying_bytes(self) -> int:
        return self._kept.nbytes - self._leaving_bytes

    def leave(self, activation: Activation) -> bool:
        activation.measure()
        if not self._with_room(lambda: self._ram.take_room(activation)):
            return False
        source, to = activation.bytes_kept(), self._ram.view(activation)
        try:
            activation.op = self._backend.to_ram(to, source, self._backend.record_event())
        except BaseException:
            self._give_back_run(activation)
            raise
        self._left_bytes += activation.span
        activation.state = ActivationState.LEAVING
        self._leaving.append(activation)
        if activation.is_counted:
            self._leaving_bytes += activation.nbytes
        return True

    def _with_room(self, take: Callable[[], bool]) -> bool:
        """Whether take() finds room in RAM, if need be when what is LEAVING has left: it can be
        written then."""
        while not take():
            if not self._leaving:
                return False
            with timeline.span("activation"):
                self.finish_leaving(self._leaving[0])
        return True

    def finish_leaving(self, activation: Activation) -> None:
        op = self._no_longer_leaving(activation)
        activation.state = ActivationState.KEPT
        try:
            op.wait()
        except BaseException as error:
            self._give_back_run(activation)
            self._kept.put_back(activation)
            if isinstance(error, OSError):
                raise activation.lost(error) from error
            raise
        activation.let_tensors_go()
        self._kept.remove(activation)
        self._ram.filled(activation)

    def _no_longer_leaving(self, activation: Activation) -> Transfer:
        op, activation.op = activation.op, None
        assert op is not None
        self._leaving.remove(activation)
        if activation.is_counted:
            self._leaving_bytes -= activation.nbytes
        return op

    def _give_back_run(self, activation: Activation) -> None:
        assert activation.run is not None
        run, activation.run = activation.run, None
        self._ram.pool.give_back(run)

    def wait_for_room(self, nbytes: int) -> bool:
        limit = self._limits.device_bytes // KEPT_SHARE
        while self._kept.nbytes + nbytes > limit:
            if not self._leaving:
                return False
            with timeline.span("activation"):
                self.finish_leaving(self._leaving[0])
        return True

    def begin_return(self, activation: Activation, must: bool) -> bool:
        if activation.on_device is not None:
            return True
        if activation.state is ActivationState.ON_DISK:

            def begin() -> bool:
                return self._ram.begin_reading(activation, must)

            if not (self._with_room(begin) if must else begin()):
                return False
        if activation.state is ActivationState.READING:
            if not must:
                return True
            self._ram.await_read(activation)
            with timeline.span("activation"):
                self._ram.finish_reading(activation)
        return self._devices.fetch(activation, self._ram.view(activation), must)

    def finish_return(self, activation: Activation) -> HandedOut:
        return self._devices.hand_out(activation)

    def read_ahead(self, upcoming: Iterable[Activation]) -> None:
        self._ram.settle()  # what has been read can be fetched
        for activation in islice(upcoming, MOST_LOOKED_AT):
            left = activation.state not in (ActivationState.KEPT, ActivationState.LEAVING)
            if left and not self.begin_return(activation, must=False):
                return

    def settle(self) -> None:
        while self._leaving and (op := self._leaving[0].op) is not None and op.done():
            self.finish_leaving(self._leaving[0])
        self._end_copies()
        self._ram.settle()
        self._devices.settle()

    def _end_copies(self) -> None:
        going_on = []
        for ending in self._ending:
            if ending.op.done():
                wait_quietly(ending.op)
                self._ram.pool.give_back(ending.run)
            else:
                going_on.append(ending)
        self._ending = going_on

    def _drop_copies(self, activation: Activation) -> None:
        self._devices.drop(activation)
        if activation.state is not ActivationState.LEAVING:
            self._ram.drop(activation)
            return
        op = self._no_longer_leaving(activation)
        self.abandon(activation)
        activation.state = ActivationState.GONE
        activation.tensors.clear()
        assert activation.run is not None
        run, activation.run = activation.run, None
        op.cancel()
        self._ending.append(_Ending(op, run))

    def rest(self) -> None:
        """Nothing: RAM stays page-locked, and the device's slots as one piece."""
        self._end_copies()
        self._ram.settle()
        self._devices.settle()

    def close(self) -> None:
        for ending in self._ending:
            wait_quietly(ending.op)
        self._devices.close()
        self._ram.finish()
        self._ram.pool.close()
        if self.file is not None:
            self.file.close()

    @property
    def elsewhere_bytes(self) -> int:
        return self._limits.host_bytes

    @property
    def device_bytes(self) -> tuple[int, int]:
        return self._devices.fetched_bytes, self._left_bytes

    def too_large(self, activation: Activation) -> str:
        device_bytes = self._limits.device_bytes
        return (
            f"{activation.words} is too large for the part of device_memory that activations have, "
            f"{_exact(device_bytes)}, of which half is for tensors as they are"
        )
