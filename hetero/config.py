"""What a user can set, checked when it is set."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, cast, get_args

import psutil

from hetero.chunks.dtypes import Dtypes, check_dtype, default_dtype
from hetero.chunks.layout import pack
from offload.device.backend import Backend, CpuBackend, EmulatedBackend
from offload.device.cuda_backend import CudaBackend, cuda_available, default_device_bytes
from offload.disk.directories import check_directories, total_free_bytes
from offload.memory.process_memory import allowed_bytes, resident_bytes
from offload.memory.sizes import parse_bytes
from offload.memory.tiers import Tier
from offload.profile.machine_profile import Profile

Policy = Literal["cuda", "cpu", "nvme", "auto"]
BackendName = Literal["cpu", "cuda", "emulated", "auto"]
StrategyName = Literal["chunk", "tensor", "bucket"]
DEFAULT_LINK_GBPS = 16.0  # of PCIe 4.0 x8, or of a shared x16 slot
_ALIASES = {"tensor_placement_policy": "placement_policy"}


@dataclass(frozen=True)
class Config:
    """Placement, budgets and dtypes of one engine.

    placement_policy  "cpu": all state in RAM. "nvme": optimizer states stream from NVMe every step,
    and gradients and parameters too as far as host_memory does not hold them. "auto": the fastest
    tiers that the budgets allow, per chunk. "cuda": all on DEVICE. host_memory       bytes of RAM
    for model state (int, or text such as "4GiB"). If it is given, what is left of it keeps
    optimizer states between steps. Default: 80 % of what is available now, of which nothing is used
    without need. reserve_memory    bytes of host_memory that are left for parameters that get an
    optimizer state later: unfrozen ones, and those of new param groups, about 14 per element in
    bf16. backend           where compute happens. "cpu" (default): in RAM. "cuda": on torch's
    current CUDA device. "auto": there, if there is one, else in RAM. "emulated": on the CPU as if
    it had memory of its own, which copies reach in the background: what a device brings can be
    tried without one. link_gbps         bandwidth of these copies in GB/s, each way; of "emulated"
    alone. Default: 16. device_memory     bytes of device memory: for parameters while they are
    used, gradients on their way to RAM, and what "auto" and "cuda" keep there. Needed by
    "emulated". Default of "cuda", or "auto": 70 % of what is free when the model is built, and,
    once steps were seen, all but what they need beside it and a reserve. If less than the reserve
    is left, it is lowered, also one that was given. With "cpu" the device's memory is RAM, so this
    then limits the slots for gathered parameters, within host_memory. nvme_path         directory
    on NVMe; needed by "nvme", and by "auto" when RAM is not enough. Several, best on different
    disks: the bytes are striped over all of them. nvme_capacity     bytes of it, of all together.
    Default: 95 % of what is free now. dtype             compute dtype: "bf16" (default), "fp16"
    (with dynamic loss scaling) or "fp32"; None: bf16 where the machine has it in hardware, else
    fp32. grad_dtype        dtype gradients are kept and accumulated in; default: the compute dtype.
    keep_fp32         patterns (as of file names: "*.norm.weight") of names of parameters that stay
    fp32 whatever `dtype` is. Those of batch normalisation always do. chunk_numel       elements per
    slot; default: found by search. io_engine         "io_uring", "threads", or "auto": io_uring
    where it works. prefetch          read what is homed on NVMe ahead of its use: parameters, and,
    while backward runs, what step() needs first. early_updates     update parameters while backward
    still runs, a chunk at a time, as soon as its gradients are final; step() then updates the rest.
    Same bits. From the second step on; for one rank; without anything that needs all gradients
    first: clipping, a GradScaler, the loss scale of fp16. Backward calls of a step before the last
    belong into hetero.no_sync(), unless each step has as many. Between backward and step()
    parameters read NaN, options of param groups must not change, and what has begun cannot be
    undone. Default: False. late_updates      step() returns while updates go on, in the order in
    which the next forward needs them: a module waits for its own parameters only. Same bits;
    clipping and loss scaling work; for one rank. Until then parameters read NaN outside of modules
    and of hetero's own calls (gathered(), state_dict(), masters() wait);
    optimizer.engine.synchronize() waits for all. With early_updates, too, the disk is busy nearly
    all the time. Default: False. zero_stage        over several ranks: 1 shards optimizer state, 2
    gradients too, 3 (default) parameters too. Budgets, like everything here, are of one rank.
    shard_strategy    "chunk" (default) shards chunks of many tensors; "tensor" every tensor by
    itself; "bucket" the tensors of one module together. Or an object of TensorShardStrategy or
    BucketTensorShardStrategy. reduce_dtype      dtype in which gradients travel between ranks;
    default: grad_dtype, and in stage 1 always. They are summed in fp32. rank_timeout_s    seconds
    after which a rank that does not take part is given up with an error. profile           what
    this machine moves and computes per second: a Profile, or the path of one that `hetero profile`
    saved. Default: the saved one, if there is one. By it the placement with the least predicted
    step time is taken, and again when steps have been traced. False, or none saved: a placement is
    chosen by sizes. expected_tokens   tokens that a rank computes per step, as far as the first
    plan needs to know: until a step has been traced. Default: 1024, that is 8 sequences of 128.
    process_memory    bytes that the whole process may hold (RSS), activations and libraries
    included; "auto": what the cgroup or RLIMIT_AS allows. If what is measured would pass it,
    host_memory is lowered, and what does not fit goes to NVMe. Default: no limit; host_memory alone
    counts. initial_loss_scale, loss_scale_window   of fp16's dynamic loss scaling: the first scale,
    and the number of good steps after which it is doubled. initial_loss_scale=None: the loss is not
    scaled here but by the user, with torch.amp.GradScaler say.

    Raises ValueError or StoreError for what cannot work.
    """

    placement_policy: Policy = "auto"
    backend: BackendName = "cpu"
    link_gbps: float | None = None
    host_memory: int | str | None = None
    reserve_memory: int | str | None = None
    device_memory: int | str | None = None
    nvme_path: str | PathLike[str] | Sequence[str | PathLike[str]] | None = None
    nvme_capacity: int | str | None = None
    dtype: str | None = "bf16"
    grad_dtype: str | None = None
    keep_fp32: Sequence[str] = ()
    chunk_numel: int | None = None
    io_engine: Literal["auto", "io_uring", "threads"] = "auto"
    prefetch: bool = True
    early_updates: bool = False
    late_updates: bool = False
    zero_stage: int = 3
    shard_strategy: Any = "chunk"
    reduce_dtype: str | None = None
    rank_timeout_s: float = 600.0
    initial_loss_scale: float | None = 65536.0
    loss_scale_window: int = 2000
    profile: Profile | str | PathLike[str] | Literal[False] | None = None
    expected_tokens: int | None = None
    process_memory: int | str | None = None

    def __post_init__(self) -> None:
        _check_choice("placement_policy", self.placement_policy, get_args(Policy))
        _check_choice("io_engine", self.io_engine, ("auto", "io_uring", "threads"))
        for name in ("host_memory", "reserve_memory", "device_memory", "nvme_capacity"):
            value = getattr(self, name)
            if name == "device_memory" and value == "auto":
                object.__setattr__(self, name, None)
            elif value is not None:
                try:
                    object.__setattr__(self, name, parse_bytes(value))
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
        self._check_planning()
        _check_choice("backend", self.backend, get_args(BackendName))
        if self.backend == "auto":
            object.__setattr__(self, "backend", "cuda" if cuda_available() else "cpu")
        compute = (
            default_dtype(cuda=self.backend == "cuda" and cuda_available())
            if self.dtype is None
            else check_dtype(self.dtype, "dtype")
        )
        object.__setattr__(self, "dtype", compute)
        if self.grad_dtype is not None:
            object.__setattr__(self, "grad_dtype", check_dtype(self.grad_dtype, "grad_dtype"))
        _check_choice("zero_stage", self.zero_stage, (1, 2, 3))
        strategy = getattr(self.shard_strategy, "name", self.shard_strategy)
        _check_choice("shard_strategy", strategy, get_args(StrategyName))
        object.__setattr__(self, "shard_strategy", strategy)
        if self.reduce_dtype is not None:
            reduce = check_dtype(self.reduce_dtype, "reduce_dtype")
            object.__setattr__(self, "reduce_dtype", reduce)
            if self.zero_stage == 1 and reduce != (self.grad_dtype or compute):
                raise ValueError(
                    f"reduce_dtype={reduce!r}: in stage 1 gradients are kept whole and travel as "
                    f"they are kept, in {self.grad_dtype or compute}; set grad_dtype, or "
                    f"zero_stage=2"
                )
        if not _is_number(self.rank_timeout_s) or not 0 < self.rank_timeout_s < math.inf:
            raise ValueError(
                f"rank_timeout_s must be a number of seconds, such as 600, not "
                f"{self.rank_timeout_s!r}"
            )
        patterns = self.keep_fp32
        if isinstance(patterns, str) or not all(isinstance(p, str) for p in patterns):
            raise ValueError(
                f"keep_fp32 must be a list of patterns of parameters' names, such as "
                f"['*.norm.weight'], not {patterns!r}"
            )
        object.__setattr__(self, "keep_fp32", tuple(patterns))
        if self.chunk_numel is not None:
            _check_integer("chunk_numel", self.chunk_numel)
            pack([], self.chunk_numel)
        _check_integer("loss_scale_window", self.loss_scale_window, at_least=1)
        scale = self.initial_loss_scale
        if scale is not None and not (_is_number(scale) and 1 <= scale < math.inf):
            raise ValueError(
                f"initial_loss_scale must be a number from 1 on, such as 65536, or None, "
                f"not {scale!r}"
            )
        for name in ("prefetch", "early_updates", "late_updates"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.early_updates and compute == "fp16" and scale is not None:
            raise ValueError(
                "early_updates with the loss scale of fp16: whether a step overflows is known only "
                "when all gradients are there; use dtype='bf16', or initial_loss_scale=None, which "
                "scales nothing"
            )
        self._check_backend()
        if self.nvme_path is not None:
            found = check_directories(_paths(self.nvme_path))
            object.__setattr__(self, "nvme_path", found[0] if len(found) == 1 else found)
        elif self.placement_policy == "nvme":
            raise ValueError(
                "placement_policy='nvme' needs nvme_path, a directory on the NVMe disk"
            )
        elif self.nvme_capacity is not None:
            raise ValueError("nvme_capacity is of no use without nvme_path; give it too")

    def _check_planning(self) -> None:
        if self.expected_tokens is not None:
            _check_integer("expected_tokens", self.expected_tokens, at_least=1)
        if self.process_memory is not None and self.process_memory != "auto":
            try:
                object.__setattr__(self, "process_memory", parse_bytes(self.process_memory))
            except ValueError as error:
                raise ValueError(f"process_memory: {error}, or 'auto'") from None
        known = (Profile, str, PathLike)
        if not (self.profile is None or self.profile is False or isinstance(self.profile, known)):
            raise ValueError(
                f"profile must be a Profile, the path of a saved one, False or None, not "
                f"{self.profile!r}"
            )

    def _check_backend(self) -> None:
        if self.backend == "cuda" and not cuda_available():
            raise ValueError(
                "backend='cuda' needs a CUDA device, and torch sees none (a build of torch without "
                "CUDA or for one before CUDA 12, no driver, or CUDA_VISIBLE_DEVICES); use 'auto', "
                "which then is 'cpu'"
            )
        if self.backend == "emulated":
            if self.device_memory is None:
                raise ValueError(
                    "backend='emulated' needs device_memory, the bytes that the emulated device has"
                )
            gbps = DEFAULT_LINK_GBPS if self.link_gbps is None else self.link_gbps
            if not _is_number(gbps) or not 1e-6 <= gbps < math.inf:
                raise ValueError(
                    f"link_gbps must be a number of GB/s of at least 1e-6, such as 16, not {gbps!r}"
                )
            object.__setattr__(self, "link_gbps", float(gbps))
        elif self.link_gbps is not None:
            raise ValueError(
                f"link_gbps is of no use with backend={self.backend!r}, which has no link; leave "
                f"it out, or give backend='emulated'"
            )
        elif self.placement_policy == "cuda" and self.backend == "cpu":
            raise ValueError(_no_cuda())

    @property
    def device_bytes(self) -> int | None:
        """device_memory, or its default now, if DEVICE has memory of its own; else None."""
        if self.backend == "cpu":
            return None
        given = self.budget(Tier.DEVICE)
        return default_device_bytes() if given is None else given

    def make_backend(self) -> Backend:
        """What computes."""
        if self.backend == "cpu":
            return CpuBackend()
        if self.backend == "cuda":
            return CudaBackend()
        assert self.link_gbps is not None
        return EmulatedBackend(self.link_gbps * 1e9)

    @property
    def dtypes(self) -> Dtypes:
        """The checked dtypes."""
        compute = check_dtype(str(self.dtype), "dtype")
        grad = check_dtype(self.grad_dtype or compute, "grad_dtype")
        reduce = self.reduce_dtype and check_dtype(self.reduce_dtype, "reduce_dtype")
        return Dtypes(compute, grad, reduce=reduce or None)

    @property
    def nvme_paths(self) -> tuple[str, ...]:
        """The directories of nvme_path; empty without one."""
        return () if self.nvme_path is None else tuple(map(str, _paths(self.nvme_path)))

    def budget(self, tier: Tier) -> int | None:
        """The user's limit of `tier` in bytes, or None."""
        value = {
            Tier.DEVICE: self.device_memory,
            Tier.HOST: self.host_memory,
            Tier.DISK: self.nvme_capacity,
        }[tier]
        return None if value is None else parse_bytes(value)

    def host_bytes(self, local_ranks: int = 1) -> int:
        """host_memory, or its default now for each of `local_ranks` that share the machine."""
        default = psutil.virtual_memory().available * 0.8 / local_ranks
        wanted = self.budget(Tier.HOST) or int(default)
        limit = self.process_bytes(local_ranks)
        if limit is not None:
            # Before a step was seen, a quarter is left for what it needs beside model state.
            wanted = min(wanted, max(1, (limit - resident_bytes()) * 3 // 4))
        return wanted

    def process_bytes(self, local_ranks: int = 1) -> int | None:
        """process_memory, or what the system allows each of `local_ranks`; None: no limit."""
        if self.process_memory == "auto":
            allowed = allowed_bytes()
            return None if allowed is None else allowed // local_ranks
        return None if self.process_memory is None else parse_bytes(self.process_memory)

    def disk_bytes(self, local_ranks: int = 1) -> int:
        """nvme_capacity, or its default now likewise; 0 without nvme_path."""
        if self.nvme_path is None:
            return 0
        default = total_free_bytes(self.nvme_paths) * 0.95 / local_ranks
        return self.budget(Tier.DISK) or int(default)

    @property
    def reserve_bytes(self) -> int:
        """reserve_memory in bytes; 0 without."""
        return 0 if self.reserve_memory is None else parse_bytes(self.reserve_memory)

    @classmethod
    def make(
        cls, config: Config | Mapping[str, Any] | str | PathLike[str] | None = None, **options: Any
    ) -> Config:
        """A Config from a Config, a mapping, the path of a JSON file, or keywords; keywords win.

        `tensor_placement_policy` is the same as `placement_policy`. Raises ValueError for an
        unknown key, with the nearest names.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        values: dict[str, Any] = {}
        if isinstance(config, (str, PathLike)):
            config = _from_file(config)
        if isinstance(config, Config):
            values = {name: getattr(config, name) for name in known}
        elif config is not None:
            values = _by_name(config, known)
        return cls(**{**values, **_by_name(options, known)})


def _by_name(options: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in options.items():
        name = _ALIASES.get(key, key)
        if name not in known:
            near = difflib.get_close_matches(str(key), [*known, *_ALIASES], n=3, cutoff=0.5)
            hint = (
                f"; did you mean {' or '.join(near)}?" if near else f"; known: {', '.join(known)}"
            )
            raise ValueError(f"unknown option {key!r}{hint}")
        if values.setdefault(name, value) != value:
            raise ValueError(
                f"{' and '.join(k for k in options if _ALIASES.get(k, k) == name)} are one option "
                f"and differ ({values[name]!r}, {value!r}); give one of them"
            )
    return values


def _from_file(path: str | PathLike[str]) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise ValueError(f"cannot read the configuration {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"the configuration {path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"the configuration {path} must be a JSON object")
    return content


def _paths(value: object) -> list[str | PathLike[str]]:
    """One path, or a list or tuple of some, as a list."""
    paths = list(value) if isinstance(value, (list, tuple)) else [value]
    if not paths or not all(isinstance(path, (str, PathLike)) for path in paths):
        raise ValueError(
            f"nvme_path must be a directory's path, or a list of such paths, not {value!r}"
        )
    return cast("list[str | PathLike[str]]", paths)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_integer(option: str, value: object, at_least: int | None = None) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or (at_least is not None and cast(int, value) < at_least):
        least = "" if at_least is None else f" of at least {at_least}"
        raise ValueError(f"{option} must be an integer{least}, not {value!r}")


def _check_choice(option: str, value: object, choices: tuple[object, ...]) -> None:
    if isinstance(value, bool) or value not in choices:
        known = [str(choice) for choice in choices]
        near = difflib.get_close_matches(str(value), known, n=2, cutoff=0.4)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ValueError(f"{option} must be one of {', '.join(known)}, not {value!r}{hint}")


def _no_cuda() -> str:
    if cuda_available():
        return (
            "placement_policy='cuda' keeps all state on the GPU, but backend='cpu' computes on the "
            "CPU; give backend='cuda' or 'auto' too"
        )
    return (
        "placement_policy='cuda' needs a CUDA device, and torch sees none; the compute device "
        "here is the CPU: use 'auto', 'cpu' or 'nvme'"
    )
