"""What ranks tell each other about a round of gradients: its beginning, its order, its end.

hetero/state/reduction/grad_reduce.py says what a round is.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import torch

from hetero.chunks.layout import Chunk
from hetero.ranks.communicator import Communicator
from hetero.ranks.peers import Channel


class RoundBegin:
    """Each rank's word whether it sends chunks before the round ends; all ranks must make one."""

    def __init__(self, everyone: Communicator, sends_in_backward: bool) -> None:
        """Sends this rank's word to `everyone` and starts receiving theirs."""
        self._sends_in_backward = sends_in_backward
        self._any = torch.tensor([sends_in_backward], dtype=torch.uint8)
        self._words = everyone.begin_any(self._any, "a backward", Channel.ROUNDS)

    def any_in_backward(self) -> bool:
        """Whether some rank sends chunks before the round ends, so that all walk the order.

        Waits for the others only if this rank does not. Raises PeerError.
        """
        if self._sends_in_backward:
            return True
        self._words.wait()
        return bool(self._any)

    def wait(self) -> None:
        """Returns when all ranks have begun the round. Raises PeerError."""
        self._words.wait()


@dataclass(frozen=True)
class RoundEnd:
    """Facts of one rank, or of all ranks together, at the end of a round.

    Attributes:
        arrived: for each parameter, whether it got a gradient.
        cleared: for each parameter, whether its gradient was cleared after it had been sent.
        unsent: for each chunk, whether it has gradients that have not been sent.
        had_turn: for each chunk, whether it is unsent although it had its turn in the round.
        busy: whether a rank is in the middle of its backward.
    """

    arrived: Sequence[bool]
    cleared: Sequence[bool]
    unsent: Sequence[bool]
    had_turn: Sequence[bool]
    busy: bool

    def any(self, everyone: Communicator) -> RoundEnd:
        """What is so on any rank. All ranks must call it. Raises PeerError."""
        members, chunks = len(self.arrived), len(self.unsent)
        # As bytes first: setting an element of a tensor takes about a microsecond.
        content = bytearray((*self.arrived, *self.cleared, *self.unsent, *self.had_turn, self.busy))
        mine = torch.frombuffer(content, dtype=torch.uint8)
        flags = everyone.any(mine, "the end of backward")
        arrived, cleared, unsent, had_turn, busy = (
            part.tolist() for part in flags.split([members, members, chunks, chunks, 1])
        )
        return RoundEnd(arrived, cleared, unsent, had_turn, busy[0])


class SendOrder:
    """The order in which all ranks send chunks.

    At first the reverse of the layout's, which is backward's if modules are registered in the order
    of their use; after the first backward the order in which the first rank's chunks were complete.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        """`chunks` are the trainable ones, in the layout's order."""
        self.is_learned = False
        self._completed: dict[int, None] = {}  # chunk ids, until the order is learned
        self._arrived: set[Hashable] = set()  # parameters, until then
        self._set(chunks[::-1])

    def _set(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = list(chunks)
        self.place = {chunk.id: place for place, chunk in enumerate(chunks)}

    def note_gradient(
        self, chunk: Chunk, members: Sequence[Hashable], arrived: Collection[Hashable]
    ) -> None:
        """A gradient of `chunk` arrived; of its `members` those in `arrived` have one by now."""
        if not self.is_learned:
            self._arrived.update(m for m in members if m in arrived)
            if all(m in self._arrived for m in members):
                self._completed.setdefault(chunk.id)

    def learn(self, everyone: Communicator) -> None:
        """Takes the first rank's order. All ranks must call it. Raises PeerError."""
        by_id = {chunk.id: chunk for chunk in self.chunks}
        order = torch.tensor(list(dict.fromkeys([*self._completed, *by_id])))
        everyone.broadcast(order, 0, "the end of the first backward")
        self._set([by_id[chunk_id] for chunk_id in order.tolist()])
        self.is_learned = True
        self._completed.clear()
        self._arrived.clear()
