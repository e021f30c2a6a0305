"""This rank's shards of PARAM at home: in RAM, or on DISK behind slots."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from hetero.homes import HostHomes
from hetero.layout import Chunk
from offload.cache import SlotCache

_POLL_S = 0.0005


class ParamShards:
    """Gives and takes the values of shards. Several threads may use it at once.

    With one rank a shard is the whole chunk, and `cache` is that of gathered copies.
    """

    def __init__(
        self,
        homes: HostHomes,
        cache: SlotCache | None,
        dtype: torch.dtype,
        patience_s: float = 0.0,
    ) -> None:
        """`patience_s`: how long to wait for room that shards on their way to ranks take."""
        self._patience_s = patience_s
        self._homes = homes
        self._cache = cache
        self._dtype = dtype
        self._lock = threading.RLock()  # for the state of slots; not held while a shard is sent

    @contextmanager
    def open(self, chunk: Chunk) -> Iterator[torch.Tensor]:
        """The shard's values, flat, inside the block.

        Raises BudgetError if there is no room, NativeIoError if it cannot be read.
        """
        if chunk in self._homes:
            yield self._homes.shard(chunk)
            return
        assert self._cache is not None
        yield self._lease(chunk, self._cache.get)

    def _lease(self, chunk: Chunk, bring: Callable[[int], None]) -> torch.Tensor:
        assert self._cache is not None
        deadline_s = time.monotonic() + self._patience_s
        while True:
            with self._lock:
                if self._cache.has_room(chunk.id) or time.monotonic() >= deadline_s:
                    bring(chunk.id)
                    return self._cache.tensor(chunk.id, self._dtype)
            time.sleep(_POLL_S)  # other threads are sending from the slots

    def fill(self, chunk: Chunk) -> torch.Tensor:
        """Flat memory for new values of the whole shard; call filled() when they are there."""
        if chunk in self._homes:
            return self._homes.shard(chunk)
        assert self._cache is not None
        return self._lease(chunk, self._cache.create)

    def filled(self, chunk: Chunk) -> None:
        """The values that fill() or open() gave were changed; returns when they are home."""
        if chunk not in self._homes:
            assert self._cache is not None
            with self._lock:
                self._cache.dirty(chunk.id)
                self._cache.write_back(chunk.id)
                self._cache.get(chunk.id)

    def invalidate(self, chunk: Chunk) -> None:
        """The optimizer is about to write new values to the shard's home."""
        if chunk not in self._homes:
            assert self._cache is not None
            with self._lock:
                self._cache.drop(chunk.id)
