"""The parameters of chunks whose updates begin, stay, are taken back, and end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hetero.chunks.layout import Chunk
from hetero.ranks.shard_server import Versions
from hetero.state.chunk_state import Done
from hetero.state.chunk_updates import ChunkUpdates
from hetero.state.copy_caches import CopyCaches
from hetero.state.gathering.all_gather import Gathering
from hetero.state.managed_param import ManagedParam
from hetero.state.memory.homes import Homes
from offload.memory.operation import wait_quietly


class ParamUpdates:
    """Leads parameters through the phases of their chunk's update.

    No copy of old values is left when an update begins; other ranks are told of new versions, and
    get the values where all ranks have homes of whole chunks (stages 1 and 2).
    """

    def __init__(
        self,
        homes: Homes,
        copies: CopyCaches,
        updates: ChunkUpdates,
        versions: Versions,
        gathering: Gathering | None,
    ) -> None:
        """No update has begun. `versions` make other ranks wait from a change until it is
        published; one rank gathers nothing."""
        self._homes = homes
        self._copies = copies
        self._updates = updates
        self._chunks = updates.chunks
        self._gathering = gathering if homes.whole else None
        # Whether other ranks' new values come to this rank's homes, in begin_gathers().
        self.gathers = self._gathering is not None
        self.versions = versions

    def begin(self, chunk: Chunk, members: Sequence[ManagedParam]) -> None:
        """An update of `members`, parameters of the chunk, is about to be submitted.

        The parameters are UPDATING until finish(), unless they are in use, or step() waits for such
        updates before anything can use them.
        """
        self._updates.versions.snapshots.wait(chunk)
        self.versions.change(chunk)
        self._copies.discard(chunk)
        is_awaited = not self._updates.goes_on(chunk) or any(m.uses for m in members)
        for m in members:
            if is_awaited:
                m.note_update()
            else:
                m.begin_update()
        is_awaited = is_awaited or not self._detach_home(chunk)
        self._updates.submit(chunk, members, is_awaited)

    def _detach_home(self, chunk: Chunk) -> bool:
        """Whether no tensor views the chunk's home, whose parameters are UPDATING."""
        resident = self._homes.is_resident(chunk)
        return not resident or self._homes.release_view(chunk, collect=False)

    def begin_speculation(self, chunk: Chunk, members: Sequence[ManagedParam]) -> bool:
        """A speculative update of `members` may be about to begin: they are UPDATING.

        Returns False, with nothing changed, if another tensor views the chunk's home: it would see
        values that step() may not confirm.
        """
        self._updates.versions.snapshots.wait(chunk)
        for m in members:
            m.begin_update(revocable=True)
        if not self._detach_home(chunk):
            home = self._homes.resident(chunk)
            for m in members:
                m.revoke_update(home)
            return False
        self._copies.drop(chunk)  # a device may be copying from it
        return True

    def decide(self, chunk: Chunk, confirmed: bool) -> None:
        """The chunk's speculative update stays, or is about to be submitted once more."""
        self.versions.change(chunk)
        self._copies.discard(chunk)  # also of old values that were read while it was prepared
        self._updates.decide(chunk, confirmed)

    def finish(self, chunks: Sequence[Chunk]) -> None:
        """Waits for the updates of `chunks` that are under way; parameters get the new values.

        Raises what an update met; this can be called again then.
        """
        chunks = [chunk for chunk in chunks if self._chunks[chunk.id].is_under_way]
        for chunk in chunks:
            self._updates.wait_updated(chunk)
        self._finish_gathers(chunks)
        for chunk in chunks:
            update, home = self._chunks[chunk.id].update, self._homes.resident(chunk)
            if isinstance(update, Done):
                for m in update.members:
                    m.end_update(home)
                self._updates.finish(chunk)  # last, so that all of it is done again after Ctrl-C

    # Where homes are whole

    def begin_gathers(self, chunks: Iterable[Chunk]) -> None:
        """Where homes are whole the other ranks' new values start to come in.

        They come when the updates are made. All ranks call this with the same chunks.
        """
        if self._gathering is not None:
            for chunk in sorted(chunks, key=lambda chunk: chunk.id):
                gather = self._gathering.start(chunk, self._homes.flat(chunk))
                self._chunks[chunk.id].whole_gather = gather

    def gather(self, chunks: Sequence[Chunk]) -> None:
        """Returns when the other ranks' values of `chunks` are here. All ranks call it."""
        self.begin_gathers(chunks)
        self._finish_gathers(chunks)

    def _finish_gathers(self, chunks: Iterable[Chunk]) -> None:
        """Waits for what begin_gathers() has started of `chunks`. Raises what it met."""
        for chunk in chunks:
            state = self._chunks[chunk.id]
            if state.whole_gather is not None:
                state.whole_gather.wait()
                state.whole_gather = None

    def wait_gathers_quietly(self) -> None:
        """Waits until what begin_gathers() has started is made, or has failed."""
        for state in self._chunks:
            wait_quietly(state.whole_gather)
