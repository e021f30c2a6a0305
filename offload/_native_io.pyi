"""The memory and I/O half of the native core: the stubs of what offload/_native.pyi names.

There is no such module: these names are offload._native's.
"""

from collections.abc import Sequence
from typing import Any

class NativeIoError(OSError):
    """A failed transfer. `errno`, `strerror` and `filename` are OSError's; the rest says where."""

    op: str  # "read" | "write"
    offset: int  # bytes into the file where the failing transfer began
    wanted_bytes: int
    got_bytes: int
    free_bytes: int  # free space of the file's filesystem; -1 if unknown

class Arena:
    """Anonymous page-aligned memory of exactly `nbytes` (rounded up to the page size), huge pages
    advised. Pages are populated on first touch. Memory lives until the object and every tensor
    exported from it are gone, and every transfer that uses it is done.
    The arena has slots of `slot_bytes` (0: it is one slot), in which transfers are counted."""

    def __init__(self, nbytes: int, slot_bytes: int = 0) -> None:
        """Raises MemoryError with the size if it cannot be mapped."""
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    def export(self, offset: int, nbytes: int, pins: Pins | None = None, slot: int = 0) -> object:
        """DLPack capsule of uint8[nbytes] at `offset`; torch.from_dlpack makes a tensor of it.
        With `pins` the count of `slot` is raised now and lowered when the last tensor that views
        the memory dies (on whichever thread that happens, without the GIL)."""
    @staticmethod
    def over(
        address: int,
        nbytes: int,
        device_type: int,
        device_id: int,
        owner: object,
        slot_bytes: int = 0,
    ) -> Arena:
        """Memory that `owner` keeps alive, on a device (DLPack's numbers); nothing here touches it.
        Raises ValueError for zero bytes or address 0."""
    @property
    def transfers(self) -> Pins:
        """How many transfers of an IoEngine or a Link use each slot now, whoever has the handle."""
    def wipe_on_fork(self, offset: int, nbytes: int) -> None:
        """A child that is forked from now on reads zeros from the range's pages. For page-locked
        ones, which fork() would copy at once; not for over()'s. ValueError for what is outside."""
    def spread(self, first: int, slots: int, arrays: Sequence[tuple[int, int]]) -> None:
        """Populates unused slots [first, first + slots): of each of the `arrays` (offset in a slot,
        bytes) the k-th of as many parts as there are NUMA nodes on node k, if the kernel lets it.
        Nothing on one node, and for over()'s. Raises ValueError for what is outside."""
    def put_on_node(self, first: int, slots: int, node: int) -> None:
        """Populates unused slots [first, first + slots) on one NUMA node, of node_near(), if the
        kernel lets it. Nothing for over()'s. Raises ValueError for what is outside."""
    def discard(self, offset: int, nbytes: int) -> None:
        """Gives the pages wholly inside the range back to the system; they read zero afterwards.
        Raises RuntimeError for over()'s, while registered, and while a transfer uses a slot of the
        range."""

class Pins:
    """Atomic counters: how many live exports (or transfers) hold each slot."""

    def __init__(self, slots: int) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, slot: int) -> int: ...
    def in_use(self) -> list[int]:
        """The slots whose count is not zero, in order."""

class IoOp:
    """One transfer. It holds the memory until it is done. A handle that goes before is cancel()led
    and waits for what is in flight."""

    def done(self) -> bool: ...
    def wait(self) -> None:
        """Blocks until complete; raises NativeIoError if it failed (each time it is called)."""
    def hurry(self) -> None:
        """Somebody waits for it now: what is not in flight takes its turn as if it were not `soon`,
        after transfers that were hurried, or were not `soon`, before. From any thread."""
    def cancel(self) -> None:
        """Drops what is not in flight; wait() raises NativeIoError with errno ECANCELED once the
        rest is done. Nothing if the operation is done or was cancelled. From any thread."""

class StripeMap:
    """How one logical file lies in several members: a repeating pattern of units.
    Member m gets `weights[m]` of the sum(weights) places of the pattern. ValueError unless every
    weight is 1 or more, their sum at most 4096, `unit_bytes` a multiple of 4096 up to 1 GiB."""

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
    def member_bytes(self, member: int, nbytes: int) -> int:
        """How many of the file's first `nbytes` lie in `member`; they are its first ones."""

class IoEngine:
    """Asynchronous file transfers: "io_uring" or "threads".
    A request is split into blocks of `block_bytes` and at most `queue_depth` blocks of all
    requests together are in flight. Short transfers are resubmitted. A block that fails for want
    of resources (EAGAIN, ENOMEM), or moves nothing, is tried again for `patience_s` seconds."""

    def __init__(
        self,
        kind: str,
        queue_depth: int = 32,
        block_bytes: int = 1 << 20,
        threads: int = 4,
        patience_s: float = 30.0,
    ) -> None:
        """Raises OSError when io_uring was not built or is refused by the kernel, ValueError for an
        unknown kind or an option out of range."""
    @property
    def kind(self) -> str: ...
    @property
    def notes(self) -> list[str]:
        """What was wanted but refused, in words (features of io_uring, registered buffers)."""
    def add_file(self, fd: int, path: str) -> int:
        """Duplicates `fd` and returns the file's id here; `path` is used in messages only."""
    def add_striped_file(
        self, members: Sequence[tuple[int, str]], stripes: StripeMap, checksums: bool = False
    ) -> int:
        """As add_file(), for one logical file of several (fd, path) members.

        `checksums`: transfers are whole pages of 4096 bytes, and what is read is compared with what
        was written when the transfer is waited for: a NativeIoError with EBADMSG says which page is
        another one."""
    def name_range(self, file: int, offset: int, nbytes: int, name: str) -> None:
        """Errors of transfers that begin in the range say what it has."""
    def checksums(self, file: int, offset: int, nbytes: int) -> bytes:
        """The CRC-32C of each page, 4 bytes each, little-endian; 0 of one never written."""
    def reserve_checksums(self, file: int, nbytes: int) -> None:
        """Memory for the checksums of a file of `nbytes`: 4 bytes for each page."""

    def set_checksums(self, file: int, offset: int, checksums: bytes) -> None:
        """What pages from `offset` on are to be, as checksums() gives it."""
    def sync(self, file: int) -> None:
        """Returns when all that is written is durable. Raises OSError that names the member."""
    def remove_file(self, file: int) -> None:
        """Waits for the file's transfers, then closes the duplicates."""
    def register(self, arena: Arena) -> bool:
        """Registers the arena's memory for fixed-buffer transfers; keeps the arena alive.
        A forked child reads zeros there. False, with a note, where the kernel refuses, and False
        for threads, which have nothing to register with."""
    def unregister(self, arena: Arena) -> None:
        """Waits for the engine's transfers of this arena, then undoes register(); nothing if not
        registered."""
    def read(self, file: int, address: int, nbytes: int, offset: int, soon: bool = False) -> IoOp:
        """Starts filling memory from the file. The memory must be in one Arena: ValueError.
        `soon`: nobody waits for it yet; it takes its turn after all that somebody waits for, and
        before the step pipeline's transfers."""
    def write(self, file: int, address: int, nbytes: int, offset: int, soon: bool = False) -> IoOp:
        """Starts writing memory to the file; as read()."""
    @property
    def stats(self) -> dict[str, Any]:
        """read_bytes, written_bytes, reads, writes (blocks), short_transfers, retries, errors, and
        busy_s (seconds for which at least one block was in flight), since the engine was made;
        in_flight: blocks that are now"""
    def inject(
        self,
        op: str,
        nth: int,
        error: int = 0,
        short_bytes: int = -1,
        count: int = 1,
        throws: bool = False,
    ) -> None:
        """For tests: the nth (from 0) block completion of `op` from now, and `count` in a row, is
        replaced by -`error`, or cut to `short_bytes`, or throws in the engine's own thread."""
    def close(self) -> None:
        """Fails operations still queued, waits for those in flight, joins threads; idempotent."""
