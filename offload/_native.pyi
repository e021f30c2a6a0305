"""The native core as Python sees it. Every call that may block releases the GIL.

Addresses are plain integers (host pointers); sizes are bytes unless the name says `numel`.
Dtypes are the strings "fp32", "bf16" and "fp16".
"""

from collections.abc import Sequence
from typing import Any, Literal

DtypeName = Literal["fp32", "bf16", "fp16"]

class NativeIoError(OSError):
    """A failed transfer. `errno`, `strerror` and `filename` are OSError's; the rest says where."""

    op: str  # "read" | "write"
    offset: int  # bytes into the file where the failing transfer began
    wanted_bytes: int
    got_bytes: int
    free_bytes: int  # free space of the file's filesystem; -1 if unknown

def build_info() -> dict[str, Any]:
    """{"liburing": version or None, "compiler": str, "isas": compiled-in instruction sets}"""

def isa_available() -> list[str]:
    """Instruction sets this machine can run, best first, ending in "scalar"."""

def isa() -> str: ...
def set_isa(name: str) -> None:
    """Forces one of isa_available(); HETERO_ISA in the environment does the same at import.

    Raises ValueError for a name that is not available.
    """

def set_threads(count: int) -> None:
    """Size of the worker pool that Adam and the norms use; its threads start at first use."""

def threads() -> int: ...
def shutdown_workers() -> None:
    """Joins the worker threads; the next use starts them again."""

class Arena:
    """Anonymous page-aligned memory of exactly `nbytes` (rounded up to the page size), huge pages
    advised. Pages are populated on first touch. Memory lives until the object and every tensor
    exported from it are gone. Raises MemoryError with the size if it cannot be mapped."""

    def __init__(self, nbytes: int) -> None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    def export(
        self, offset: int, nbytes: int, leases: Leases | None = None, slot: int = 0
    ) -> object:
        """DLPack capsule of uint8[nbytes] at `offset`; torch.from_dlpack makes a tensor of it.

        With `leases` the count of `slot` is raised now and lowered when the last tensor that
        views the memory dies (on whichever thread that happens, without the GIL).
        """
    def discard(self, offset: int, nbytes: int) -> None:
        """Gives the pages wholly inside the range back to the system; they read zero afterwards."""

class Leases:
    """Atomic counters: how many live exports hold each slot."""

    def __init__(self, slots: int) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, slot: int) -> int: ...

class IoOp:
    """One transfer. Keep it until waited for."""

    def done(self) -> bool: ...
    def wait(self) -> None:
        """Blocks until complete; raises NativeIoError if it failed (each time it is called)."""
    def cancel(self) -> None:
        """Drops what is not in flight; wait() raises NativeIoError with errno ECANCELED once the
        rest is done. Nothing if the operation is done or was cancelled. From any thread."""

class StripeMap:
    """How one logical file lies in several members: a repeating pattern of units.

    Member m gets `weights[m]` of the sum(weights) places of the pattern. ValueError unless every
    weight is at least 1, their sum at most 4096, and `unit_bytes` a multiple of 4096 up to 1 GiB.
    """

    def __init__(self, weights: Sequence[int], unit_bytes: int) -> None: ...
    @property
    def members(self) -> int: ...
    @property
    def unit_bytes(self) -> int: ...
    @property
    def pattern(self) -> list[int]:
        """The member of each place."""
    def place(self, offset: int) -> tuple[int, int, int]:
        """(member, offset in it, bytes from there on that are contiguous in file and member)"""
    def offset_of(self, member: int, member_offset: int) -> int:
        """The inverse of place()."""
    def member_bytes(self, member: int, nbytes: int) -> int:
        """How many of the file's first `nbytes` lie in `member`; they are its first ones."""

class IoEngine:
    """Asynchronous file transfers: "io_uring" or "threads".

    A request is split into blocks of `block_bytes` and at most `queue_depth` blocks of all
    requests together are in flight. Short transfers are resubmitted, EAGAIN and EINTR retried.
    """

    def __init__(
        self, kind: str, queue_depth: int = 32, block_bytes: int = 1 << 20, threads: int = 4
    ) -> None:
        """Raises OSError when io_uring is refused by the kernel, ValueError for an unknown kind
        or one that was not built."""
    @property
    def kind(self) -> str: ...
    @property
    def notes(self) -> list[str]:
        """What was wanted but refused, in words (registered buffers, registered file)."""
    def add_file(self, fd: int, path: str) -> int:
        """Duplicates `fd` and returns the file's id here; `path` is used in messages only."""
    def add_striped_file(self, members: Sequence[tuple[int, str]], stripes: StripeMap) -> int:
        """As add_file(), for one logical file of several (fd, path) members."""
    def remove_file(self, file: int) -> None:
        """Waits for the file's transfers, then closes the duplicates."""
    def register(self, arena: Arena) -> bool:
        """Registers the arena's memory for fixed-buffer transfers; keeps the arena alive."""
    def unregister(self, arena: Arena) -> None:
        """Waits for the engine's transfers, then undoes register(); nothing if not registered."""
    def read(self, file: int, address: int, nbytes: int, offset: int) -> IoOp: ...
    def write(self, file: int, address: int, nbytes: int, offset: int) -> IoOp: ...
    @property
    def stats(self) -> dict[str, int]:
        """read_bytes, written_bytes, reads, writes (blocks), short_transfers, retries, errors,
        since the engine was made; in_flight: blocks that are now"""
    def inject(
        self,
        op: str,
        nth: int,
        error: int = 0,
        short_bytes: int = -1,
        count: int = 1,
        throws: bool = False,
    ) -> None:
        """For tests: the nth (from 0) block completion of `op` from now is replaced by -`error`,
        or cut to `short_bytes`, or throws in the engine's own thread; `count` completions in a
        row."""
    def close(self) -> None:
        """Fails operations still queued, waits for those in flight, joins threads; idempotent."""

class AdamHyper:
    """Hyper-parameters of one segment, as Python floats (the kernel rounds them to fp32).

    `step` is the number of the update being made, from 1.
    """

    def __init__(
        self,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decoupled: bool,
        bias_correction: bool,
        step: int,
    ) -> None: ...

def adam_step(
    dtype: DtypeName,
    grad_dtype: DtypeName,
    param: int,
    grad: int,
    master: int,
    exp_avg: int,
    exp_avg_sq: int,
    numel: int,
    hyper: AdamHyper,
    grad_scale: float,
) -> None:
    """One fused update in place. `master` is uint16[numel] remainders for bf16, fp32[numel] for
    fp16, and 0 for fp32."""

def split_master(source: int, param: int, remainder: int, exp_avg_sq: int, numel: int) -> None:
    """fp32 source -> bf16 param, uint16 remainder, and the carry into the sign bit of exp_avg_sq
    (whose magnitude is kept)."""

def join_master(param: int, remainder: int, exp_avg_sq: int, target: int, numel: int) -> None:
    """The exact fp32 value that split_master took apart."""

def sum_of_squares(dtype: DtypeName, address: int, numel: int) -> float:
    """Sum of squares in double, in a fixed order that does not depend on threads or instruction
    set. Finite if and only if every element is finite."""

class Location:
    """Where a payload of a piece lives: in RAM (`address` != 0) or in the pipeline's file."""

    def __init__(self, address: int = 0, file_offset: int = -1) -> None: ...

class StepTask:
    """One piece's update. `segments` are (first element, numel, index into hypers)."""

    def __init__(
        self,
        key: int,
        param: Location,
        grad: Location,
        record: Location,
        segments: Sequence[tuple[int, int, int]],
    ) -> None: ...

class StepPipeline:
    """read -> Adam -> write over pieces, on a thread of its own.

    Every piece has room for `piece_numel` elements. A record is laid out as
    [master | exp_avg | exp_avg_sq], each `piece_numel` long (no master part for fp32). The buffers
    are slots of `arena`, one after another, each `buffer_bytes(...)` long, and hold
    [record | param | grad], a part only if the pipeline was made with it. A buffer keeps its clean
    content after its write, and a later task with the same key does not read it again.
    """

    def __init__(
        self,
        engine: IoEngine | None,
        file: int,
        arena: Arena | None,
        buffers: int,
        dtype: DtypeName,
        grad_dtype: DtypeName,
        piece_numel: int,
        param_in_file: bool,
        grad_in_file: bool,
    ) -> None:
        """`param_in_file` / `grad_in_file`: buffers have room for these parts (single tasks may
        still use RAM for them). Without an engine only tasks that live in RAM are allowed."""
    @staticmethod
    def buffer_bytes(
        dtype: DtypeName,
        grad_dtype: DtypeName,
        piece_numel: int,
        param_in_file: bool,
        grad_in_file: bool,
    ) -> int: ...
    def submit(
        self, tasks: Sequence[StepTask], hypers: Sequence[AdamHyper], grad_scale: float
    ) -> None:
        """Queues the tasks in order and returns at once."""
    def wait_updated(self) -> None:
        """Until every submitted update is computed: parameters in RAM are final, gradients free.
        Raises the first failure; the pipeline then refuses further work with the same error."""
    def wait_written(self, key: int = -1) -> None:
        """Until all writes (or those of `key`) are in the file. Raises like wait_updated."""
    def forget(self, key: int = -1) -> None:
        """Drops kept buffer contents (of `key`, or all) after waiting for their writes: somebody
        else is about to write the file."""
    @property
    def stats(self) -> dict[str, float]:
        """tasks, hits, read_bytes, written_bytes, adam_s, read_wait_s, write_wait_s"""
    def close(self) -> None:
        """Abandons queued tasks, waits for transfers in flight, joins the thread; idempotent."""
