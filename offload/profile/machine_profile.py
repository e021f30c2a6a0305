"""What a machine moves and computes per second: the facts that a plan is made from."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 2
_TEXTS = ("name", "date", "source")
_COUNTS = ("devices", "threads")
_TABLES = ("update_bytes_per_s", "device_update_bytes_per_s", "matmul_flop_per_s")
_OF_A_DISK = ("nvme_read_bytes_per_s", "nvme_write_bytes_per_s", "nvme_mixed_bytes_per_s")
# What ranks share only if they share a device.
_OF_A_DEVICE = (
    *("h2d_bytes_per_s", "d2h_bytes_per_s", "rank_bytes_per_s", "node_bytes_per_s"),
    *("device_update_bytes_per_s", "matmul_flop_per_s", "device_bytes"),
)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What predicting a step needs to know of a machine. Bytes per second; None: there is none.

    Attributes:
        name: of the machine, or of where the rates come from.
        dram_bytes_per_s: RAM, reads and writes together, as the update kernels mix them.
        nvme_read_bytes_per_s, nvme_write_bytes_per_s, nvme_mixed_bytes_per_s: the disks, O_DIRECT,
            in large transfers: reads alone, writes alone, and half of each at once (both counted).
            None where no directory was given.
        h2d_bytes_per_s, d2h_bytes_per_s: the link between RAM and one device; None where DEVICE is
            RAM.
        update_bytes_per_s: of the fused optimizer update on the CPU, by the parameters' dtype:
            bytes as UpdateKind.bytes_moved counts them.
        device_update_bytes_per_s: of the same on one device.
    """

    name: str
    dram_bytes_per_s: float
    nvme_read_bytes_per_s: float | None = None
    nvme_write_bytes_per_s: float | None = None
    nvme_mixed_bytes_per_s: float | None = None
    h2d_bytes_per_s: float | None = None
    d2h_bytes_per_s: float | None = None
    update_bytes_per_s: Mapping[str, float]
    device_update_bytes_per_s: Mapping[str, float] | None = None

    @property
    def separate(self) -> bool:
        """Whether DEVICE is other memory than RAM."""
        return self.h2d_bytes_per_s is not None

    def rate(self, table: str, dtype: str) -> float:
        """The rate in the table of that name, by the parameters' dtype.

        Raises ValueError if there is none for `dtype`.
        """
        rates = getattr(self, table) or {}
        if dtype not in rates:
            raise ValueError(
                f"the profile {self.name!r} has no {table} for {dtype}, only for "
                f"{', '.join(rates) or 'nothing'}; measure again (hetero profile) or choose another"
            )
        return float(rates[dtype])


@dataclass(frozen=True, kw_only=True)
class Profile(Rates):
    """One machine: its rates, per second, and its sizes in bytes; None: there is none.

    Attributes:
        date, source: when, and by what, it was measured.
        devices: of compute; the CPU is one. The rates and sizes are of all devices together,
            unless said otherwise.
        threads: that updates on the CPU use.
        rank_bytes_per_s, node_bytes_per_s: what one device sends to others of its machine, and to
            other machines while all devices do.
        rank_latency_s, node_latency_s: of a message between devices of the machine, and to other
            machines.
        matmul_flop_per_s: FLOP/s of one device (2 per multiply-add) by dtype, at a transformer's
            shapes, forward and backward.
        host_bytes, device_bytes, nvme_bytes: sizes of RAM, of one device's memory, and of the free
            space on disk.
    """

    date: str
    source: str
    devices: int
    threads: int
    rank_bytes_per_s: float | None = None
    node_bytes_per_s: float | None = None
    matmul_flop_per_s: Mapping[str, float]
    host_bytes: int
    device_bytes: int | None = None
    nvme_bytes: int | None = None
    rank_latency_s: float | None = None
    node_latency_s: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self._check(field.name, getattr(self, field.name), "None" in str(field.type))
        for names in (
            _OF_A_DISK,
            ("h2d_bytes_per_s", "d2h_bytes_per_s", "device_bytes", "device_update_bytes_per_s"),
        ):
            given = [name for name in names if getattr(self, name) is not None]
            if 0 < len(given) < len(names):
                missing = next(name for name in names if name not in given)
                raise ValueError(f"{given[0]} is given but {missing} is not; give all or none")

    def with_disk(self, factor: float) -> Profile:
        """This machine with a disk so many times as fast, reading and writing alike."""
        rates: Any = {name: factor * (getattr(self, name) or 0.0) for name in _OF_A_DISK}
        return dataclasses.replace(self, **rates)

    def share(self, ranks: int) -> Profile:
        """What one of `ranks` on this machine has when all are busy.

        RAM, disks and the CPU are shared; a device is shared only by more ranks than there are.
        """
        per_device = math.ceil(ranks / self.devices)
        made: dict[str, Any] = {"devices": 1, "threads": max(1, self.threads // ranks)}
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            of = per_device if name in _OF_A_DEVICE else ranks
            if isinstance(value, Mapping):
                made[name] = {dtype: rate / of for dtype, rate in value.items()}
            elif name.endswith("_bytes") and value is not None:
                made[name] = value // of
            elif name.endswith("_bytes_per_s") and value is not None:
                made[name] = value / of
        return dataclasses.replace(self, **made)

    def as_dict(self) -> dict[str, Any]:
        """The object that a file holds."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the profile as JSON, whole or not at all. Raises OSError."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
        try:
            partial.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """The profile that a file holds. Raises ValueError, naming the file and what is wrong."""
        try:
            content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"cannot read the profile {path}: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"the profile {path} is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"the profile {path} must be a JSON object")
        form = content.pop("format", None)
        if form != FORMAT or isinstance(form, bool):
            raise ValueError(f"the profile {path} has format {form!r}; this version reads {FORMAT}")
        fields = dataclasses.fields(cls)
        known = {field.name for field in fields}
        needed = {field.name for field in fields if field.default is dataclasses.MISSING}
        for what, names in (("unknown", content.keys() - known), ("no", needed - content.keys())):
            if names:
                raise ValueError(f"the profile {path} has {what} field {sorted(names)[0]!r}")
        try:
            return cls(**content)
        except ValueError as error:
            raise ValueError(f"the profile {path}: {error}") from None

    def _check(self, name: str, value: object, may_be_none: bool) -> None:
        if value is None and may_be_none:
            return
        if name in _TEXTS:
            if not isinstance(value, str):
                raise ValueError(f"{name} must be text, not {value!r}")
        elif name in _TABLES:
            if not isinstance(value, Mapping) or not value:
                raise ValueError(f"{name} must be an object of rates by dtype, not {value!r}")
            for key, rate in value.items():
                _require_positive(f"{name}[{key!r}]", rate)
        else:
            _require_positive(name, value, whole=name in _COUNTS or name.endswith("_bytes"))


def default_path() -> Path:
    """Where `hetero profile` leaves the profile of this machine, and `hetero plan` looks for it."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says that relative paths are to be ignored.
    base = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return base / "hetero" / "profile.json"


def _require_positive(name: str, value: Any, whole: bool = False) -> None:
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        kind = "integer" if whole else "number"
        raise ValueError(f"{name} must be a positive {kind}, not {value!r}")
