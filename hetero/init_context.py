"""Building a model whose parameters do not all fit in RAM."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from os import PathLike
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from hetero.config import Config
from offload.errors import BudgetError, HeteroError
from offload.heap import trim_heap
from offload.ledger import Ledger
from offload.sizes import PAGE_BYTES, format_bytes, round_up
from offload.store import ScratchFile
from offload.tiers import Account, Tier

_BLOCK_BYTES = 4 << 20  # of one transfer to or from the file
_TRIM_BYTES = 16 << 20  # given up since the heap was last trimmed
_USES_OF_UNSHARED = 2  # a storage that only the parameter and the one who counts refer to


class Stage:
    """Parameters under construction, in their construction dtype, before they have a chunk.

    They stay ordinary tensors in RAM until the host budget is needed for something else; then the
    least recently brought in go to a scratch file and become absent. Each remembers its stage as
    `_hetero_stage`.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.host_bytes = config.host_bytes()
        self.disk_bytes = config.disk_bytes()
        self.ledger = Ledger(
            {
                Tier.DEVICE: config.budget(Tier.DEVICE),
                Tier.HOST: self.host_bytes,
                Tier.DISK: self.disk_bytes,
            }
        )
        self.ledger.relieve = self._relieve
        self._charged: dict[int, int] = {}  # id(param) -> bytes; the order is that of eviction
        self._params: dict[int, weakref.ref[torch.nn.Parameter]] = {}
        # id(param) -> (offset, bytes) in the file, kept while the parameter is here: what is
        # evicted again goes where it was.
        self._extents: dict[int, tuple[int, int]] = {}
        self._on_disk: set[int] = set()  # id(param) of those whose bytes are only there
        self._absent: dict[int, torch.Tensor] = {}  # id(param) -> what stands in for it
        self._by_storage: dict[int, int] = {}  # address of an absent tensor's element -> id(param)
        self._file: ScratchFile | None = None
        self._untrimmed_bytes = 0

    @property
    def notes(self) -> list[str]:
        """What the scratch file has to say, until close()."""
        return self._file.notes if self._file is not None else []

    @property
    def any_absent(self) -> bool:
        """Whether some parameter is on disk."""
        return bool(self._on_disk)

    def adopt(self, param: torch.nn.Parameter) -> None:
        """Takes charge of a parameter. Others' parameters and known ones are left alone."""
        if getattr(param, "_hetero_stage", None) is not None or not param.is_floating_point():
            return
        if param.device.type != "cpu":
            raise HeteroError(
                f"a parameter of shape {tuple(param.shape)} was made on {param.device}; build the "
                f"model on the CPU: hetero places it"
            )
        key, nbytes = id(param), param.numel() * param.element_size()
        self.ledger.charge(Tier.HOST, Account.INIT, nbytes)
        self._charged[key] = nbytes
        param._hetero_stage = self  # type: ignore[attr-defined]
        self._params[key] = weakref.ref(param, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        """The parameter is gone, or has found its home."""
        self._give_up(self._charged.pop(key, 0))
        self._params.pop(key, None)
        self._on_disk.discard(key)
        self._extents.pop(key, None)
        absent = self._absent.pop(key, None)
        if absent is not None:
            del self._by_storage[absent.untyped_storage().data_ptr()]

    def _relieve(self, tier: Tier, nbytes: int) -> None:
        if tier is not Tier.HOST or self.config.nvme_path is None:
            return
        for key in list(self._charged):
            if nbytes <= 0:
                return
            param = self._params[key]()
            if param is not None and _may_be_evicted(param):
                nbytes -= self._charged[key]
                self._evict(key, param)

    def _evict(self, key: int, param: torch.nn.Parameter) -> None:
        if self._file is None:
            self._file = ScratchFile(self.config.nvme_paths, self.ledger, Account.INIT)
        flat = param.data.contiguous().view(-1).view(torch.uint8)
        offset, reserved_bytes = self._extents.get(key, (0, 0))
        if reserved_bytes < flat.numel():  # the first time, or converted to a larger dtype since
            offset, reserved_bytes = self._file.reserve(flat.numel()), flat.numel()
            self._extents[key] = offset, reserved_bytes
        for begin, block in _blocks(flat.numel()):
            part = flat[begin : begin + len(block)]
            torch.frombuffer(block, dtype=torch.uint8)[: part.numel()].copy_(part)
            self._file.write_from(block[: round_up(part.numel(), PAGE_BYTES)], offset + begin)
        absent = self._absent.get(key)
        if absent is None:
            absent = torch.full((), float("nan"), dtype=param.dtype).expand(param.shape)
            self._absent[key] = absent
            self._by_storage[absent.untyped_storage().data_ptr()] = key
        param.data = absent
        self._on_disk.add(key)
        self._give_up(self._charged.pop(key))

    def _give_up(self, nbytes: int) -> None:
        self.ledger.release(Tier.HOST, Account.INIT, nbytes)
        self._untrimmed_bytes += nbytes
        if self._untrimmed_bytes >= _TRIM_BYTES:
            self._untrimmed_bytes = 0
            trim_heap()

    def _bring_in(self, key: int, param: torch.nn.Parameter) -> None:
        nbytes = param.numel() * param.element_size()
        self.ledger.charge(Tier.HOST, Account.INIT, nbytes)
        self._charged[key] = nbytes
        values = torch.empty(param.shape, dtype=param.dtype)
        raw = values.view(-1).view(torch.uint8)
        for begin, part in self._read(self._extents[key][0], nbytes):
            raw[begin : begin + part.numel()] = part
        param.data = values
        self._on_disk.remove(key)

    def _read(self, offset: int, nbytes: int) -> Iterator[tuple[int, torch.Tensor]]:
        assert self._file is not None
        for begin, block in _blocks(nbytes):
            wanted = min(len(block), nbytes - begin)
            self._file.read_into(block[: round_up(wanted, PAGE_BYTES)], offset + begin)
            yield begin, torch.frombuffer(block, dtype=torch.uint8)[:wanted]

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, or the present value if it is an absent parameter or an alias of one."""
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            return tensor
        key = self._by_storage.get(tensor.untyped_storage().data_ptr())
        if key is None:
            return tensor
        param = self._params[key]()
        assert param is not None
        if key in self._on_disk:
            self._bring_in(key, param)
        return param.data

    def blocks(
        self, param: torch.nn.Parameter, wanted: slice
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Elements `wanted` of the flat parameter, wherever they are.

        As (first element, flat fp32 tensor) blocks; a block is valid until the next one.

        Raises HeteroError if it was converted or replaced while it was on disk.
        """
        key, itemsize = id(param), param.element_size()
        if key not in self._on_disk:
            flat = param.data.reshape(-1)
            for begin in range(wanted.start, wanted.stop, _BLOCK_BYTES // itemsize):
                end = min(begin + _BLOCK_BYTES // itemsize, wanted.stop)
                yield begin, flat[begin:end].float()
            return
        if param.data.untyped_storage().data_ptr() not in self._by_storage:
            raise HeteroError(
                f"a parameter of shape {tuple(param.shape)} was moved or converted after "
                f"ZeroInitContext had put it on disk; do that inside the context"
            )
        first = wanted.start * itemsize // PAGE_BYTES * PAGE_BYTES
        skip = wanted.start * itemsize - first
        offset = self._extents[key][0] + first
        for begin, raw in self._read(offset, wanted.stop * itemsize - first):
            values = raw[skip:].view(param.dtype).float()
            yield (first + begin + skip) // itemsize, values
            skip = 0

    def release(self, param: torch.nn.Parameter) -> None:
        """The parameter has found its home: its bytes here are given up. Idempotent."""
        if getattr(param, "_hetero_stage", None) is not None:
            self._forget(id(param))
            del param._hetero_stage  # type: ignore[attr-defined]

    def restore(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Brings all back in and lets them go, as if they had not been adopted."""
        self.ledger.relieve = None
        for param in params:
            key = id(param)
            if key in self._on_disk:
                values = torch.empty(param.shape, dtype=param.dtype)
                for begin, block in self.blocks(param, slice(0, param.numel())):
                    values.view(-1)[begin : begin + block.numel()] = block
                param.data = values
            self.release(param)
        self.close()

    def close(self) -> None:
        """Frees the scratch file."""
        self.ledger.relieve = None
        trim_heap()
        if self._file is not None:
            self._file.close()
            self._file = None


def _may_be_evicted(param: torch.nn.Parameter) -> bool:
    """Whether nothing but the parameter refers to its memory, so that no write can be lost."""
    storage = param.untyped_storage()
    nbytes = param.numel() * param.element_size()
    return (
        0 < nbytes == storage.nbytes()
        and torch._C._storage_Use_Count(storage._cdata) <= _USES_OF_UNSHARED
    )


def _blocks(nbytes: int) -> Iterator[tuple[int, memoryview]]:
    """(offset, page-aligned block) over `nbytes`; every block is the same memory."""
    size = min(_BLOCK_BYTES, round_up(nbytes, PAGE_BYTES))
    memory = memoryview(mmap.mmap(-1, size))
    for begin in range(0, nbytes, size):
        yield begin, memory


class _DispatchMode(TorchDispatchMode):
    """Every operator that touches an absent parameter gets its value, and writes reach it."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stage = stage

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._stage.any_absent:
            return func(*args, **kwargs)
        stands_for: dict[int, torch.Tensor] = {}

        def real(tensor: torch.Tensor) -> torch.Tensor:
            value = self._stage.real(tensor)
            if value is not tensor:
                stands_for[id(value)] = tensor
            return value

        real_args, real_kwargs = tree_map_only(torch.Tensor, real, (args, kwargs))
        result = func(*real_args, **real_kwargs)
        # In-place operators return their argument: give back the one that the caller has.
        return tree_map_only(torch.Tensor, lambda t: stands_for.get(id(t), t), result)


class ZeroInitContext:
    """Inside the block, parameters of modules are built within the host budget.

    Takes a Config, a mapping, the path of a JSON file, or Config's fields as keywords. Weights come
    out bit for bit as in plain construction under the same seed, whatever initialisation the
    modules do.

        with hetero.ZeroInitContext(placement_policy="nvme", nvme_path="/mnt/nvme"):
            model = GPT2LMHeadModel(config)

    Raises ValueError or a hetero error for options that cannot work, BudgetError if one parameter
    alone does not fit.
    """

    _active: ZeroInitContext | None = None

    def __init__(
        self, config: Config | Mapping[str, Any] | str | PathLike[str] | None = None, **options: Any
    ) -> None:
        self.stage = Stage(Config.make(config, **options))
        self._mode = _DispatchMode(self.stage)
        self._register: Callable[..., None] | None = None

    def __enter__(self) -> ZeroInitContext:
        if ZeroInitContext._active is not None:
            raise HeteroError("ZeroInitContext is already active; contexts do not nest")
        ZeroInitContext._active = self
        original = torch.nn.Module.register_parameter
        self._register = original
        stage = self.stage

        def register_parameter(
            module: torch.nn.Module, name: str, param: torch.nn.Parameter | None
        ) -> None:
            original(module, name, param)
            if param is not None:
                try:
                    stage.adopt(param)
                except BudgetError as error:
                    raise BudgetError(
                        f"building {type(module).__name__}.{name} of shape {tuple(param.shape)} "
                        f"({format_bytes(param.numel() * param.element_size())}): {error}"
                    ) from None

        torch.nn.Module.register_parameter = register_parameter  # type: ignore
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        assert self._register is not None
        torch.nn.Module.register_parameter = self._register  # type: ignore[method-assign]
        ZeroInitContext._active = None
