"""The options of a training: what users set, what it means, and whether it can work."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from os import PathLike
from typing import Any, Literal, cast, get_args

import psutil

from hetero.chunks.dtypes import Dtypes, check_dtype, default_dtype
from hetero.chunks.layout import pack
from hetero.debug import NAMES as DEBUG_NAMES
from hetero.debug import DebugOptions
from hetero.option_checks import (
    check_choice,
    check_integer,
    checked_patterns,
    is_number,
    options_by_name,
    options_from_file,
)
from offload.device.backend import Backend, CpuBackend, EmulatedBackend
from offload.device.cuda_backend import CudaBackend, cuda_available, default_device_bytes
from offload.disk.directories import check_directories, ram_filesystem, total_free_bytes
from offload.memory.process_memory import allowed_bytes, resident_bytes
from offload.memory.sizes import parse_bytes
from offload.memory.tiers import Tier

Policy = Literal["cuda", "cpu", "nvme", "auto"]
BackendName = Literal["cpu", "cuda", "emulated", "auto"]
# Of what process_memory leaves; before a step was seen, the rest is kept for what steps need.
FIRST_STATE_SHARE = Fraction(3, 4)
_MEMORY_OPTIONS = (
    "host_memory",
    "reserve_memory",
    "activation_memory",
    "device_memory",
    "nvme_capacity",
    "process_memory",
)
_AUTO_OPTIONS = ("activation_memory", "process_memory")
# Of a device's memory activations have one part in so many, and of host_memory ("auto") the first
# of these shares that leaves enough for model state; at least what is of use to small models.
_DEVICE_SHARE = 8
_HOST_SHARES = 4, 8
_LEAST_ACTIVATION_BYTES = 16 << 20
_ALIASES = {"tensor_placement_policy": "placement_policy"}


@dataclass(frozen=True)
class Config:
    """The options of one training. They are checked here, so a Config that exists is usable.

    Amounts of memory are bytes, or text such as "4GiB". With several ranks each has budgets of its
    own, and defaults are its share of the machine.

    Args:
        placement_policy: where state lives between uses. "auto" (default): in RAM as far as
            host_memory goes, the rest on NVMe, and on the device as much as its budget holds.
            "cpu": all in RAM; refused if it does not fit. "nvme": optimizer state streams from
            NVMe in every step, and so do gradients and parameters that do not fit in RAM; use it
            to keep RAM free for other programs. "cuda": all on the device, the fastest tier and
            the smallest.
        backend: the device that computes. "cpu" (default): the CPU, from RAM. "cuda": torch's
            current CUDA device. "auto": a CUDA device if there is one, else the CPU. "emulated":
            the CPU, as a device with memory of its own and copies in the background, to try out
            how a device behaves. Needs device_memory.
        host_memory: hard limit of RAM for model state. Default: 80 % of the free RAM, of which
            hetero uses only what it needs. If you give it, the rest of it keeps optimizer state
            between steps, which saves NVMe traffic. It counts neither libraries nor, without
            activation_memory, activations; process_memory counts both.
        reserve_memory: bytes of host_memory that stay free for parameters that get optimizer state
            later: unfrozen ones, and those of new param groups. In bf16 with Adam they need about
            14 bytes per element. Default: none. Other state cannot use these bytes.
        activation_memory: bytes of host_memory for activations; the rest of them go to nvme_path
            and come back ahead of their use. Default: all activations stay in memory, uncounted;
            with process_memory "auto".
            "auto": a quarter of host_memory; activations that find no room stay uncounted, where a
            number makes that an error. A separate device has an eighth of device_memory for them.
        recompute: the blocks of the model (equal modules in a ModuleList or Sequential) that
            compute their forward again in backward, so that fewer activations are kept. Only where
            activations have a budget. "auto" (default): as many as needed for the rest to fit in
            the memory of the device that computes; engine.explain() says how many. "none"; "all";
            or patterns of module names (["*.layers.*"]), among which it chooses as "auto" does.
        device_memory: hard limit of device memory: for parameters in use, gradients on their way
            to RAM, and state whose home is there. Needed by "emulated". Default with CUDA: "auto",
            70 % of the free memory at first, and after two steps all that a step leaves free but a
            reserve of a 32nd. A limit that you give is lowered as well when less than that reserve
            is free. It bounds neither activations nor other memory that torch's allocator has
            reserved. With backend "cpu" it limits gathered parameters inside host_memory.
        nvme_path: directory on NVMe for scratch files; needed by "nvme", and by "auto" if RAM is
            too small. State is striped evenly over a list of directories, best on disks that are
            equally fast; by their free space if one is too full. The files have no names and end
            with the process. Default: none.
        nvme_capacity: hard limit of the bytes in all directories together. Default: 95 % of the
            free space.
        dtype: dtype of parameters in forward and backward. "bf16" (default); "fp16", with dynamic
            loss scaling; "fp32", which doubles their memory and traffic. None: bf16 where the
            compute device multiplies it in hardware, else fp32. Optimizer updates are in fp32.
        grad_dtype: dtype in which gradients are kept and accumulated. Default: `dtype`. "fp32"
            makes the sum over many micro-batches exact, and doubles the memory of gradients.
        keep_fp32: patterns of names of parameters, as of file names ("*.norm.weight"), that stay
            fp32 whatever `dtype` is. Default: only those of batch normalisation. They cost
            twice the memory, and are a chunk group of their own.
        chunk_numel: elements per slot, the unit of placement and of transfers. Default: the size
            that wastes least. Smaller ones fit tighter budgets, larger ones move faster.
        durable: keep the state in files, so that it survives a crash or a loss of power. They are
            in the folder "hetero-state" of nvme_path, which no other training may use.
            hetero.initialize() continues from the last commit there, with any number of ranks,
            policy, budgets and dtype; hetero.resume() says which. Default: False. True takes room
            on NVMe for all state twice, and steps also write the state in RAM there.
        verify_reads: compare all reads from NVMe with checksums, so that a bit that the disk has
            changed is an error that names chunk and parameters. Default: False, because it takes
            compute time for each byte; always on with durable=True.
        commit_every: steps between commits of a durable state: a crash loses the steps since the
            last one. Default: 1. A larger number writes less where state is in RAM. 0: only
            hetero.commit() commits; for loops with a scheduler, a position in the data, or several
            optimizers.
        zero_stage: state that the ranks shard. 1: optimizer state. 2: gradients as well. 3
            (default): parameters as well. A lower stage needs more memory; 1 and 2 gather
            parameters once, at the end of step(), and not in forward and backward. 1 keeps
            gradients whole until step(), and averages them once for all micro-batches, as
            no_sync() does.
        reduce_dtype: dtype in which gradients travel between ranks. Default: grad_dtype. Sums are
            in fp32 in any case; "bf16" halves the traffic of fp32.
        rank_timeout_s: seconds that a rank waits for another one until it raises a PeerError that
            names it. Default: 600. Raise it if one rank may be that much slower.
        process_memory: limit of the whole process (RSS), activations and libraries included, or
            "auto": the limit of the cgroup or of RLIMIT_AS. If a step needs more, fewer activations
            are kept, host_memory is lowered between steps, and state moves to NVMe. Default: no
            limit.
        initial_loss_scale: first factor of fp16's dynamic loss scaling, from 1 on. Default: 65536.
            None: hetero does not scale the loss, for loops that use torch.amp.GradScaler.
        loss_scale_window: steps without overflow after which the loss scale is doubled. Default:
            2000. Every overflow halves it and skips a step.
        debug: options that no training needs: a DebugOptions of hetero.debug, or a mapping of its
            names.

    Raises:
        ValueError: an option has a wrong type or value, or does not fit another one.
        StoreError: nvme_path cannot be used.
    """

    placement_policy: Policy = "auto"
    backend: BackendName = "cpu"
    host_memory: int | str | None = None
    reserve_memory: int | str | None = None
    activation_memory: int | str | None = None
    recompute: str | Sequence[str] = "auto"
    device_memory: int | str | None = None
    nvme_path: str | PathLike[str] | Sequence[str | PathLike[str]] | None = None
    nvme_capacity: int | str | None = None
    dtype: str | None = "bf16"
    grad_dtype: str | None = None
    keep_fp32: Sequence[str] = ()
    chunk_numel: int | None = None
    durable: bool = False
    commit_every: int = 1
    verify_reads: bool = False
    zero_stage: int = 3
    reduce_dtype: str | None = None
    rank_timeout_s: float = 600.0
    initial_loss_scale: float | None = 65536.0
    loss_scale_window: int = 2000
    process_memory: int | str | None = None
    debug: DebugOptions | Mapping[str, Any] = dataclasses.field(default_factory=DebugOptions)

    def __post_init__(self) -> None:
        check_choice("placement_policy", self.placement_policy, get_args(Policy))
        if isinstance(self.debug, Mapping):
            self._set("debug", DebugOptions(**options_by_name(self.debug, DEBUG_NAMES, {})))
        elif not isinstance(self.debug, DebugOptions):
            raise ValueError(
                f"debug must be a DebugOptions of hetero.debug, or a mapping of its names such as "
                f"{{'prefetch': False}}, not {self.debug!r}"
            )
        for name in _MEMORY_OPTIONS:
            value = getattr(self, name)
            if name == "device_memory" and value == "auto":
                self._set(name, None)
            elif value is not None and (name not in _AUTO_OPTIONS or value != "auto"):
                try:
                    self._set(name, parse_bytes(value))
                except ValueError as error:
                    hint = ", or 'auto'" if name in _AUTO_OPTIONS else ""
                    raise ValueError(f"{name}: {error}{hint}") from None
        check_choice("backend", self.backend, get_args(BackendName))
        if self.backend == "auto":
            self._set("backend", "cuda" if cuda_available() else "cpu")
        compute = (
            default_dtype(cuda=self.backend == "cuda" and cuda_available())
            if self.dtype is None
            else check_dtype(self.dtype, "dtype")
        )
        self._set("dtype", compute)
        if self.grad_dtype is not None:
            self._set("grad_dtype", check_dtype(self.grad_dtype, "grad_dtype"))
        check_choice("zero_stage", self.zero_stage, (1, 2, 3))
        if self.reduce_dtype is not None:
            reduce = check_dtype(self.reduce_dtype, "reduce_dtype")
            self._set("reduce_dtype", reduce)
        if not is_number(self.rank_timeout_s) or not 0 < self.rank_timeout_s < math.inf:
            raise ValueError(
                f"rank_timeout_s must be a number of seconds, such as 600, not "
                f"{self.rank_timeout_s!r}"
            )
        patterns = checked_patterns("keep_fp32", self.keep_fp32, "parameters", "*.norm.weight")
        self._set("keep_fp32", patterns)
        if isinstance(self.recompute, str):
            check_choice("recompute", self.recompute, ("auto", "none", "all"))
        else:
            patterns = checked_patterns("recompute", self.recompute, "modules", "*.layers.*")
            self._set("recompute", patterns)
        if self.chunk_numel is not None:
            check_integer("chunk_numel", self.chunk_numel)
            pack([], self.chunk_numel)
        check_integer("loss_scale_window", self.loss_scale_window, at_least=1)
        scale = self.initial_loss_scale
        if scale is not None and not (is_number(scale) and 1 <= scale < math.inf):
            raise ValueError(
                f"initial_loss_scale must be a number from 1 on, such as 65536, or None, "
                f"not {scale!r}"
            )
        check_integer("commit_every", self.commit_every, at_least=0)
        for name in ("durable", "verify_reads"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}")
        self._check_backend()
        if self.nvme_path is not None:
            found = check_directories(_paths(self.nvme_path), self.debugging.allow_ram_filesystem)
            self._set("nvme_path", found[0] if len(found) == 1 else found)
            self._check_files_in_ram()
        elif self.placement_policy == "nvme":
            raise ValueError(
                "placement_policy='nvme' needs nvme_path, a directory on the NVMe disk"
            )
        elif self.nvme_capacity is not None:
            raise ValueError("nvme_capacity is of no use without nvme_path; give it too")
        elif self.durable:
            raise ValueError(
                "durable=True needs nvme_path, a directory on the NVMe disk, where the state stays"
            )

    def _check_files_in_ram(self) -> None:
        """Raises ValueError if files in RAM, which are allowed, break another option's promise."""
        if not self.files_are_ram:
            return
        files = f"files in {' and '.join(self.nvme_paths)} are RAM"
        if self.durable:
            raise ValueError(f"durable=True: {files}, which no loss of power leaves; use a disk")
        if self.process_memory is not None:
            raise ValueError(
                f"process_memory={self.process_memory!r}: {files} that is no process's own, but "
                f"that the kernel counts to the cgroup; give host_memory instead, or use a disk"
            )
        host = self.budget(Tier.HOST)
        if host is not None and (self.budget(Tier.DISK) or 0) >= host:
            raise ValueError(
                f"nvme_capacity={self.nvme_capacity} leaves nothing of host_memory={host}: {files} "
                f"that is taken from there"
            )

    @property
    def files_are_ram(self) -> bool:
        """Whether some directory of nvme_path is on a RAM filesystem, which is allowed then."""
        return self.debugging.allow_ram_filesystem and any(map(ram_filesystem, self.nvme_paths))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_backend(self) -> None:
        if self.backend == "cuda" and not cuda_available():
            raise ValueError(
                "backend='cuda' needs a CUDA device, and torch sees none (a build of torch without "
                "CUDA or for one before CUDA 12, no driver, or CUDA_VISIBLE_DEVICES); use 'auto', "
                "which then is 'cpu'"
            )
        if self.backend == "emulated" and self.device_memory is None:
            raise ValueError(
                "backend='emulated' needs device_memory, the bytes that the emulated device has"
            )
        self._set("debug", self.debugging.for_backend(self.backend))
        if self.placement_policy == "cuda" and self.backend == "cpu":
            raise ValueError(
                "placement_policy='cuda' needs a CUDA device, and the compute device here is the "
                "CPU: give backend='cuda' or 'auto' where torch sees a GPU, or use 'auto', 'cpu' "
                "or 'nvme'"
            )

    @property
    def has_checksums(self) -> bool:
        """Whether pages of files have checksums, which are in RAM."""
        return self.durable or self.verify_reads

    @property
    def debugging(self) -> DebugOptions:
        """The option `debug`, checked."""
        assert isinstance(self.debug, DebugOptions)
        return self.debug

    @property
    def device_bytes(self) -> int | None:
        """device_share() of one rank."""
        return self.device_share(1)

    def device_share(self, local_ranks: int) -> int | None:
        """device_memory, or its default now for each of `local_ranks`; None if DEVICE is RAM."""
        if self.backend == "cpu":
            return None
        given = self.budget(Tier.DEVICE)
        return default_device_bytes(local_ranks) if given is None else given

    def make_backend(self) -> Backend:
        """The backend that `backend` names."""
        if self.backend == "cpu":
            return CpuBackend()
        if self.backend == "cuda":
            return CudaBackend()
        assert self.debugging.link_gbps is not None
        return EmulatedBackend(self.debugging.link_gbps * 1e9)

    @property
    def dtypes(self) -> Dtypes:
        """The dtypes of parameters and gradients; the optimizer adds those of its state."""
        compute = check_dtype(str(self.dtype), "dtype")
        grad = check_dtype(self.grad_dtype or compute, "grad_dtype")
        reduce = self.reduce_dtype and check_dtype(self.reduce_dtype, "reduce_dtype")
        return Dtypes(compute, grad, reduce=reduce or None)

    @property
    def nvme_paths(self) -> tuple[str, ...]:
        """The directories of nvme_path; empty without one."""
        return () if self.nvme_path is None else tuple(map(str, _paths(self.nvme_path)))

    def budget(self, tier: Tier) -> int | None:
        """The limit of `tier` that the user gave, in bytes; None if a default applies."""
        name = "nvme_capacity" if tier is Tier.DISK else f"{tier.value}_memory"
        value: int | None = getattr(self, name)  # parsed
        return value

    def host_bytes(self, local_ranks: int = 1, beside_bytes: int | None = None) -> int:
        """host_memory, or its default now for each of `local_ranks` that share the machine.

        `beside_bytes` are what the process holds beside model state; None: all that it holds now.
        """
        wanted = self._ram_bytes(local_ranks, beside_bytes)
        # The ledger counts files and RAM apart, and a plan fills each: so the files' room is taken
        # away at once, and both budgets together are never more than host_memory.
        return wanted - self.disk_bytes(local_ranks) if self.files_are_ram else wanted

    def _ram_bytes(self, local_ranks: int, beside_bytes: int | None = None) -> int:
        """host_bytes() and the files in RAM."""
        default = psutil.virtual_memory().available * 0.8 / local_ranks
        wanted = self.budget(Tier.HOST) or int(default)
        limit = self.process_bytes(local_ranks)
        if limit is not None:
            held = resident_bytes() if beside_bytes is None else beside_bytes
            wanted = min(wanted, max(1, int((limit - held) * FIRST_STATE_SHARE)))
        return wanted

    def process_bytes(self, local_ranks: int = 1) -> int | None:
        """process_memory, or what the system allows each of `local_ranks`; None: no limit."""
        if self.process_memory is not None:
            # hetero imports it when a checkpoint needs it, and then it would come on top.
            importlib.import_module("torch.distributed.checkpoint")
        if self.process_memory == "auto":
            allowed = allowed_bytes()
            return None if allowed is None else allowed // local_ranks
        assert not isinstance(self.process_memory, str)  # parsed
        return self.process_memory

    def disk_bytes(self, local_ranks: int = 1) -> int:
        """nvme_capacity, or its default now for each of `local_ranks`; 0 without nvme_path."""
        if self.nvme_path is None:
            return 0
        default = total_free_bytes(self.nvme_paths) * 0.95 / local_ranks
        if self.files_are_ram:
            default = min(default, self._ram_bytes(local_ranks) / 2)
        return self.budget(Tier.DISK) or int(default)

    @property
    def reserve_bytes(self) -> int:
        """reserve_memory in bytes; 0 if it was not given."""
        return 0 if self.reserve_memory is None else parse_bytes(self.reserve_memory)

    def activation_bytes(self, host_bytes: int, device_bytes: int | None) -> list[tuple[int, int]]:
        """The bytes of RAM, and of a DEVICE that is not RAM, that activations may have.

        Of budgets of so many bytes; None: DEVICE is RAM. Several are to be tried in their order,
        until the model state has room, too. [(0, 0)] without activation_limit.
        """
        if self.activation_limit is None:
            return [(0, 0)]
        on_device = 0 if device_bytes is None else device_bytes // _DEVICE_SHARE
        if self.activation_limit != "auto":
            return [(parse_bytes(self.activation_limit), on_device)]
        # Where the whole process has a limit, state gets more when steps have shown what they need.
        shares = _HOST_SHARES if self.process_memory is None else (2, *_HOST_SHARES)
        parts = [host_bytes // share for share in shares]
        return [(part, on_device) for part in (*parts, min(parts[-1], _LEAST_ACTIVATION_BYTES))]

    def least_activation_bytes(self, state_bytes: int) -> int:
        """The least that activation_bytes() says of RAM in which model state takes so many."""
        if self.activation_limit != "auto":
            return self.activation_bytes(0, None)[0][0]
        return min(-(-state_bytes // (_HOST_SHARES[-1] - 1)), _LEAST_ACTIVATION_BYTES)

    @property
    def activation_limit(self) -> int | str | None:
        """activation_memory; "auto" if it was not given and process_memory limits the process."""
        if self.activation_memory is None and self.process_bytes() is not None:
            return "auto"
        return self.activation_memory

    @classmethod
    def make(
        cls, config: Config | Mapping[str, Any] | str | PathLike[str] | None = None, **options: Any
    ) -> Config:
        """Makes a Config from what ZeroInitContext() and initialize() are given.

        Args:
            config: a Config, a mapping of options, or the path of a JSON file with an object of
                options; None: all defaults.
            **options: single options, which replace those in `config`; a mapping for `debug`
                replaces the options that it names. tensor_placement_policy is another name of
                placement_policy.

        Returns:
            a new, checked Config.

        Raises:
            ValueError: an option is unknown (the message has the nearest names) or wrong.
            StoreError: nvme_path cannot be used.
        """
        values: dict[str, Any] = {}
        if isinstance(config, (str, PathLike)):
            config = options_from_file(config)
        if isinstance(config, Config):
            values = dict(vars(config))
        elif isinstance(config, Mapping):
            values = _by_name(config)
        elif config is not None:
            raise ValueError(
                f"options are a mapping, the path of a JSON file, or a Config, not {config!r}"
            )
        before = values.get("debug")
        values |= _by_name(options)
        if before is not None and isinstance(values["debug"], Mapping):
            named = vars(before) if isinstance(before, DebugOptions) else before
            values["debug"] = {**named, **values["debug"]}
        return cls(**values)


def option_names() -> list[str]:
    """All options by which Config.make() knows them."""
    return [field.name for field in dataclasses.fields(Config)]


def _by_name(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by their names in Config. Raises ValueError for one that it has not."""
    for name in options:
        if name in DEBUG_NAMES:
            raise ValueError(
                f"{name} is an option of debug; give debug={{{name!r}: {options[name]!r}}}"
            )
    return options_by_name(options, option_names(), _ALIASES)


def _paths(value: object) -> list[str | PathLike[str]]:
    """One path, or a list or tuple of some, as a list."""
    paths = list(value) if isinstance(value, (list, tuple)) else [value]
    if not paths or not all(isinstance(path, (str, PathLike)) and path != "" for path in paths):
        raise ValueError(
            f"nvme_path must be a directory's path, or a list of such paths, not {value!r}"
        )
    return cast("list[str | PathLike[str]]", paths)
