"""What a save or commit beside training has still to copy: changes of a chunk wait for that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from hetero.chunks.layout import Chunk


class Snapshot:
    """Chunks whose state is copied by another thread as it is now, each before it changes.

    That thread takes one chunk after the other; one that somebody waits for comes first.

    Attributes:
        was_told: the failure was raised.
    """

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        """`chunks` are in the order in which they are copied as long as nobody waits."""
        self._pending = {(c.group_index, c.id): c for c in chunks}
        self._wanted: dict[tuple[int, int], Chunk] = {}
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self.was_told = False

    def take(self) -> Chunk | None:
        """The chunk to copy next; None when all are copied. It is pending until copied()."""
        with self._changed:
            for wanted, chunk in self._wanted.items():
                if wanted in self._pending:
                    return chunk
            return next(iter(self._pending.values()), None)

    def upcoming(self, chunk: Chunk) -> Chunk | None:
        """The chunk that is likely to be copied after `chunk`; None if there is none."""
        with self._changed:
            key = (chunk.group_index, chunk.id)
            return next((each for other, each in self._pending.items() if other != key), None)

    def copied(self, chunk: Chunk) -> None:
        """The chunk may change."""
        with self._changed:
            self._pending.pop((chunk.group_index, chunk.id), None)
            self._wanted.pop((chunk.group_index, chunk.id), None)
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing more is copied, because all is, or because the save has failed."""
        with self._changed:
            self._pending.clear()
            self._changed.notify_all()

    def fail(self, failure: BaseException) -> None:
        """The chunks that are pending must not change any more: wait() raises `failure`."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    @property
    def has_ended(self) -> bool:
        """Whether nothing is pending."""
        return not self._pending

    def may_change(self, chunk: Chunk) -> bool:
        """Whether wait() would return at once."""
        return (chunk.group_index, chunk.id) not in self._pending

    def wait(self, chunk: Chunk) -> None:
        """Until the chunk may change."""
        key = (chunk.group_index, chunk.id)
        if key not in self._pending:
            return
        with self._changed:
            self._wanted.setdefault(key, chunk)
            self._wait_for(lambda: key not in self._pending)

    def wait_all(self) -> None:
        """Until all chunks may change."""
        with self._changed:
            self._wait_for(lambda: not self._pending)

    def _wait_for(self, is_over: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: is_over() or self._failure is not None)
        if self._failure is not None and not is_over():
            self.was_told = True
            raise self._failure


class Snapshots:
    """The snapshots of saves and commits that go on beside training.

    Attributes:
        wait_s: seconds for which changes have waited for them.
    """

    def __init__(self) -> None:
        """None goes on."""
        self._going_on: list[Snapshot] = []
        self.wait_s = 0.0

    def add(self, snapshot: Snapshot) -> None:
        """From here on changes of chunks wait for `snapshot`, until it ends."""
        self._going_on = [each for each in self._going_on if not each.has_ended]
        self._going_on.append(snapshot)

    def may_change(self, chunk: Chunk) -> bool:
        """Whether wait() would return at once."""
        return all(snapshot.may_change(chunk) for snapshot in self._going_on)

    def wait(self, chunk: Chunk) -> None:
        """Until none has to copy the chunk as it is now. Raises what a commit has met."""
        if self.may_change(chunk):
            return
        began_s = time.perf_counter()
        try:
            for snapshot in self._going_on:
                snapshot.wait(chunk)
        finally:
            self.wait_s += time.perf_counter() - began_s

    def wait_all(self) -> None:
        """wait() of all chunks."""
        for snapshot in self._going_on:
            snapshot.wait_all()
