"""The native core as Python sees it. Every call that may block releases the GIL.

Addresses are plain integers (host pointers); sizes are bytes unless the name says `numel`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

DtypeName = Literal["fp32", "bf16", "fp16"]
StateDtypeName = Literal["fp32", "bf16", "8bit"]
RuleName = Literal["adam", "lion", "adagrad", "sgd", "muon", "muon_momentum"]
CarrierName = Literal["none", "sign", "lowest", "remainder"]

def build_info() -> dict[str, Any]:
    """{"liburing": version or None, "compiler": str, "isas": compiled-in instruction sets}"""

def isa_available() -> list[str]:
    """Instruction sets this machine can run, best first, ending in "scalar"."""

def isa() -> str: ...
def set_isa(name: str) -> None:
    """Forces one of isa_available(), as HETERO_ISA in the environment does at import. Raises
    ValueError for a name that is not available."""

def set_threads(count: int) -> None:
    """Size of the worker pool that updates and norms use: the calling thread and `count` - 1
    workers, which start at first use and sleep while there is nothing to compute."""

def permit_peers_to_read(permit: bool) -> None:
    """Lets processes of the same user read this one's memory, or not any more, where only ancestors
    may otherwise (Yama's ptrace_scope 1)."""

def read_peer_memory(process: int, source: int, into: int, nbytes: int) -> None:
    """Copies memory at the address `source` of another process of this machine. Raises OSError if
    it is gone, may not be read, or has no memory there."""

def stream_copy(to: int, source: int, nbytes: int) -> None:
    """Copies memory past the caches, which nobody reads soon."""

def threads() -> int:
    """Size of the worker pool; at first the number of CPUs that this process may run on."""

def start_threads() -> int:
    """Starts the workers, as their first use would. Returns how many threads a run has then, the
    caller included: fewer than threads() where the system has no room for more."""

def shutdown_workers() -> None:
    """Joins the worker threads; the next use starts them again."""

def start_timeline(capacity: int) -> None:
    """Begins to record when the core's resources are busy, at most `capacity` intervals, for which
    room is taken now. RuntimeError if that is done already."""

def stop_timeline() -> tuple[int, int, list[tuple[Any, int, int, int]], int]:
    """Ends it: (begin, end, intervals, dropped), with intervals as (lane, begin, end, bytes) in the
    order of their ends, in nanoseconds of perf_counter_ns(). Lanes: "update" (a tile or a whole
    update), "nvme_read" and "nvme_write" (an operation, from its first block's transfer). What is
    under way at the beginning counts from there on, at the end not at all. RuntimeError if nothing
    is being recorded."""

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
        the memory dies (on whichever thread that happens, without the GIL). RuntimeError in a
        forked child, if part of the memory is left out there (wipe_on_fork())."""
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
        """How many transfers of an IoEngine use each slot now, whoever has the handle."""
    def wipe_on_fork(self, offset: int, nbytes: int) -> None:
        """A child that is forked from now on has not the range's pages: who reads them there ends
        it with SIGSEGV, because zeros would be wrong numbers. For page-locked ones, which fork()
        would copy at once; not for over()'s. ValueError for what is outside."""
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
        A forked child has not that memory (wipe_on_fork()). False, with a note, where the kernel
        refuses, and False for threads, which have nothing to register with."""
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

class OffloadOp:
    """One array of an OffloadQueue. A handle that goes before is cancel()led and waits."""

    def done(self) -> bool: ...
    def wait(self) -> None:
        """Blocks until it has arrived, added if that was wanted; raises an OSError, with the
        device's words, if a part of it did not (each time it is called)."""
    def cancel(self) -> None:
        """What is not begun yet is not needed: wait() may end early, then raises an OSError with
        errno ECANCELED. Nothing if it has arrived. From any thread."""

class OffloadQueue:
    """Brings arrays from a GPU to RAM, in a thread and in their order. One that has the dtype of
    its place, and replaces what is there, is copied there, whole. Another one comes to buffers in
    RAM, part by part: parts are copied while one before them is added or converted, by the threads
    of the worker pool that are idle: in fp32, rounded once, as torch does."""

    def __init__(
        self,
        functions: Mapping[str, int],
        context: int,
        stream: int,
        buffers: int,
        count: int,
        buffer_bytes: int,
    ) -> None:
        """In a stream of a context (handles of CUDA's driver). `functions` are the addresses of the
        driver's functions, by name. `buffers` is the address of `count` times `buffer_bytes`, which
        outlive it. Raises ValueError if a function is missing, or the buffers have no room for an
        element."""
    def submit(
        self,
        source: int,
        source_dtype: DtypeName,
        to: int,
        dtype: DtypeName,
        numel: int,
        add: bool,
        event: int = 0,
    ) -> OffloadOp:
        """Starts bringing `numel` elements from address `source`, on the device, to address `to`.
        `add`: to what is there. `event` is the device's, after which they are computed; 0: they
        are. All three stay until it is done. RuntimeError after close()."""
    def close(self) -> None:
        """Cancels all that is under way, joins the thread; idempotent."""

class UpdateKind:
    """Which update: the rule and the dtypes of its arrays. Immutable; equal kinds hash equally.
    Rules and their states: "adam" (Adam and AdamW: exp_avg, exp_avg_sq), "lion" (exp_avg),
    "adagrad" (sum), "sgd" (momentum_buffer). Muon (momentum_buffer) has two passes: "muon_momentum"
    updates the momentum and writes directions, in bf16, to the parameter's place; "muon" moves the
    parameter along its direction, which is in the gradient's place.
    native/update/kernels/update_rules.inl.h has the formulas and their order. States in bf16 are
    rounded stochastically."""

    def __init__(
        self,
        dtype: DtypeName,
        grad_dtype: DtypeName,
        rule: RuleName = "adam",
        state_dtype: StateDtypeName = "fp32",
    ) -> None:
        """Raises ValueError for an unknown name."""
    @property
    def dtype(self) -> DtypeName:
        """Of parameters."""
    @property
    def grad_dtype(self) -> DtypeName: ...
    @property
    def rule(self) -> RuleName: ...
    @property
    def state_dtype(self) -> StateDtypeName: ...
    @property
    def states(self) -> int:
        """How many states the rule has: 2 or 1."""
    @property
    def carrier(self) -> CarrierName:
        """Which bit of the last state belongs to the split master of a bf16 parameter: its sign
        (adam, adagrad), its lowest (the others), or none with others. In 8 bits "remainder"."""
    def state_bytes(self, numel: int) -> int:
        """Bytes of one state of `numel` elements; in 8 bits those of whole state blocks."""
    def state_at(self, state: int, tile_numel: int) -> int:
        """Where a state begins in a tile's optimizer state, in bytes."""
    def optim_state_bytes(self, tile_numel: int) -> int:
        """Bytes of a tile's optimizer state, in whole pages."""
    def bytes_moved(self, numel: int) -> int:
        """Bytes that one update of `numel` elements reads and writes."""

class Hyper:
    """Hyper-parameters of one segment, as Python floats (the kernel rounds them to fp32).
    `step` is the number of the update being made, from 1; the gradient is multiplied by
    `grad_scale` first. A rule ignores the fields that it does not have: of adagrad are lr,
    weight_decay, eps, lr_decay and step; of lion lr, weight_decay, beta1 and beta2; of sgd lr,
    weight_decay, momentum, dampening (not in step 1), nesterov and step; of muon lr, lr_scale (a
    factor on lr, but for weight decay), weight_decay, momentum and nesterov. lion's and muon's
    weight decay is decoupled and adagrad's and sgd's is not: anything else is refused at use."""

    def __init__(
        self,
        *,
        lr: float,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        bias_correction: bool = True,
        lr_decay: float = 0.0,
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        lr_scale: float = 1.0,
        step: int = 1,
        grad_scale: float = 1.0,
    ) -> None:
        """Raises ValueError for a value out of range, and for nesterov unless momentum is more than
        0 and dampening 0."""

def update(
    kind: UpdateKind,
    param: int,
    grad: int,
    master: int,
    states: Sequence[int],
    numel: int,
    hyper: Hyper,
    index: int = 0,
) -> None:
    """One fused update in place. `master` is uint16[numel] remainders for bf16, fp32[numel] for
    fp16, and 0 for fp32; `states` are as many addresses as the rule has states.
    `index` is the number of the first element, from which (modulo 2^32) and from the step its
    random bits are made; bf16 states need it, so that bits do not depend on how arrays are cut."""

def update_constants(kind: UpdateKind, hyper: Hyper) -> bytes:
    """UpdateConstants of native/update/kernels/kernels.h: what an update is computed with, rounded
    to fp32 once. Raises ValueError for weight decay that the rule does not have."""

def cuda_sources() -> dict[str, str]:
    """native/update/cuda/update.cu and all that it includes, by the names it includes them by."""

def split_master(
    kind: UpdateKind, source: int, param: int, remainder: int, carrier: int, numel: int
) -> None:
    """fp32 source -> bf16 param, uint16 remainder, and the carry into the carrier, which is the
    rule's last state: into the bit that UpdateKind.carrier says; its other bits are kept. Raises
    ValueError unless the parameters are bf16, and for a carrier where there is none (0)."""

def encode_state(kind: UpdateKind, state: int, source: int, blocks: int, numel: int) -> None:
    """fp32 source -> state blocks of the kind's state number `state`, each value rounded to the
    nearest code. Of a last block that is cut short the rest stays. Raises ValueError unless the
    kind's states are kept in 8 bits."""

def decode_state(kind: UpdateKind, state: int, blocks: int, target: int, numel: int) -> None:
    """State blocks -> fp32 values. Raises likewise."""

def join_master(
    kind: UpdateKind, param: int, remainder: int, carrier: int, target: int, numel: int
) -> None:
    """The exact fp32 value that split_master took apart. Raises likewise."""

def sum_of_squares(dtype: DtypeName, address: int, numel: int) -> float:
    """Sum of squares in double, in a fixed order that does not depend on threads or instruction
    set. Finite if and only if every element is finite."""

def mean(dtype: DtypeName, sources: Sequence[int], target: int, numel: int) -> None:
    """target = sum of the sources / their number, for arrays of `numel` elements of `dtype`; the
    target may be one of them. Summed in fp32 in the sources' order and rounded once, by the same
    bits for every number of threads and instruction set. Raises ValueError without a source."""

def copy_and_sum(
    source_dtype: DtypeName, source: int, dtype: DtypeName, target: int, numel: int
) -> float:
    """target = source, rounded to nearest even. Returns the target's sum_of_squares(), of the same
    pass over memory. While others use the worker pool, the calling thread does all of it."""

def add_and_sum(
    source_dtype: DtypeName, source: int, dtype: DtypeName, target: int, numel: int
) -> float:
    """target += source, in fp32 and rounded once, as torch does. Returns as copy_and_sum()."""

def stream(param: int, grad: int, exp_avg: int, exp_avg_sq: int, numel: int) -> None:
    """The memory yardstick: adds fp32[numel] `grad` to the other three arrays, in the blocks and on
    the threads of an update. Moves 28 bytes per element with next to no arithmetic."""

def crc32c(address: int, nbytes: int, crc: int = 0) -> int:
    """CRC-32C (RFC 3720) of memory; `crc` is that of the bytes before it. By the processor's own
    instruction, if it has one, unless isa() is "scalar"."""

class Location:
    """Where one part of a tile lives: in RAM (`address` != 0) or in the pipeline's file."""

    def __init__(self, address: int = 0, file_offset: int = -1) -> None: ...

class StepTask:
    """One tile's update. `segments` are (first element in the tile, numel, index into hypers,
    number of the first element as in update()). Tasks are made in the order of `priority`; those
    with the same, or of one tile, as submitted.
    Optimizer state in the file goes to the file offset `optim_state_to`, parameters in the file to
    `param_to`, so that what was read stays; without them to where they were. Of parameters in RAM
    the old bits are first written to `saved_param`. -1: none."""

    def __init__(
        self,
        key: int,
        param: Location,
        grad: Location,
        optim_state: Location,
        segments: Sequence[tuple[int, int, int, int]],
        priority: int = 0,
        optim_state_to: int = -1,
        param_to: int = -1,
        saved_param: int = -1,
    ) -> None: ...

class StepPipeline:
    """read -> update -> write over tiles, so many at once as give the worker pool's threads work.
    Every tile has room for `tile_numel` elements; docs/formats.md has its layout, and that of the
    buffers, which are slots of `arena`, one after another, each `buffer_bytes(...)` long. A buffer
    keeps its content for a later task with the same key. A parameter is written at once; an
    optimizer state only when its buffer is needed for another one, or by flush(). A key's optimizer
    state must not move before forget()."""

    def __init__(
        self,
        engine: IoEngine | None,
        file: int,
        arena: Arena | None,
        buffers: int,
        kind: UpdateKind,
        tile_numel: int,
        param_in_file: bool,
        grad_in_file: bool,
    ) -> None:
        """`param_in_file` / `grad_in_file`: buffers have room for these parts (single tasks may
        still use RAM for them). Without an engine only tasks that live in RAM are allowed."""
    @staticmethod
    def buffer_bytes(
        kind: UpdateKind, tile_numel: int, param_in_file: bool, grad_in_file: bool
    ) -> int: ...
    def submit(
        self, tasks: Sequence[StepTask], hypers: Sequence[Hyper], kind: UpdateKind | None = None
    ) -> None:
        """Queues the tasks, each in its turn among those without a buffer; returns at once. `kind`:
        of the update, if not the pipeline's. Raises ValueError if it lays tiles out otherwise."""
    def expect(
        self, expected: Sequence[tuple[int, Location, Location, int]], streaming: int = 0
    ) -> None:
        """Reads ahead what tasks to come, in this order, will find in the file and no buffer has.
        Each is (key, param, optim_state, priority) as in a StepTask. Replaces what was expected
        before; submit() takes its keys out. With `streaming` 0 it takes buffers whose content no
        task wants. Else the order is the same in every step, and all buffers but so many keep what
        is used next first, of what is used together the last (of nothing: what they kept before).
        Never waits; what was read for nothing does no harm. Raises ValueError for what is not
        valid, and the pipeline's failure."""
    def take_back(self, first: int, count: int) -> bool:
        """Drops the tasks of `count` keys from `first` on, one of each, if none has begun; whether
        it did. Raises the pipeline's failure."""
    def keeps(self, key: int, count: int = 1) -> bool:
        """Whether the optimizer state of one of `count` tiles, whose keys begin at `key`, stays in
        its buffer from step to step, unwritten."""
    def wait_updated(self, key: int = -1, count: int = 1) -> None:
        """Until every submitted update (or those of `count` keys from `key` on) is computed:
        parameters in RAM are final, gradients free. Raises the first failure, as all work after it
        does."""
    def is_updated(self, key: int = -1, count: int = 1) -> bool:
        """Whether wait_updated(key, count) would return, or raise, at once."""
    def is_written(self, key: int = -1, count: int = 1) -> bool:
        """Whether wait_written(key, count) would return, or raise, at once."""
    def wait_written(self, key: int = -1, count: int = 1) -> None:
        """Until no write (or none of `key`) is under way: parameters in the file are final. Raises
        like wait_updated."""
    def flush(self, key: int = -1, count: int = 1) -> None:
        """Writes what only buffers have (of the keys), and waits. Raises like wait_updated."""
    def forget(self, key: int = -1, count: int = 1) -> None:
        """flush(), then drops the kept content and what is expected."""
    def give_up(self, why: str) -> None:
        """The caller's part of an update has failed: further work is refused with `why`."""
    @property
    def stats(self) -> dict[str, float]:
        """tasks (updated), hits (of them, found in a buffer that kept their parts), ahead (found
        read ahead), read_bytes, written_bytes, busy_s (some update was unfinished), compute_s (some
        was computed)"""
    def inject(self, nth: int) -> None:
        """For tests: the nth update from now (from 0) raises RuntimeError and changes nothing."""
    def hold(self, nth: int) -> None:
        """For tests: the nth update from now (from 0) waits for release(), or for close(); its
        reads are done then. One update is held at a time."""
    def release(self) -> None:
        """Lets the update that hold() stopped, or would stop, go on."""
    def close(self) -> None:
        """Abandons queued tasks, waits for transfers in flight, joins the threads; idempotent.
        Optimizer states that were not flushed are lost."""
