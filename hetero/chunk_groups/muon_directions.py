"""Muon's directions: what comes between the two passes of its update (Dtypes.passes).

The first pass leaves each matrix's momentum, and the second one moves each matrix along it as it is
then. In between it is orthogonalised: all singular values of a matrix become about 1.

The gradient stays as it is: directions are memory of their own, in the parameter's place in the
first pass and in the gradient's in the second. Optimizer state passes the disk once each way as
long as a chunk's tiles fit into the buffers, because no buffer is written between the passes. All
ranks must run on one kind of machine: torch's matrix products, unlike hetero's kernels, have other
bits with other instruction sets. In no budget are the directions of one chunk (2 bytes an element),
the products of one matrix (about 10), and what is on its way between ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hetero.chunks.layout import Chunk, Layout
from hetero.ranks.communicator import Communicator
from hetero.ranks.waiting import name_error
from hetero.state.managed_param import ManagedParam
from offload.errors import PeerError

Options = Mapping[str, Any]  # of a param group


class MuonDirections:
    """Orthogonalises the directions of a chunk's matrices, each of them whole, where compute is.

    With several ranks each matrix has an owner, which gets its parts from the others and gives them
    back. So the bits do not depend on how a chunk is divided.
    """

    def __init__(self, layout: Layout, shard: Communicator | None, device: torch.device) -> None:
        """`shard`: the ranks that share chunks, if there are several. `device`: of compute."""
        self._layout = layout
        self._shard = shard
        self._device = device

    @property
    def needs_order(self) -> bool:
        """Whether all ranks must go through the chunks in the same order."""
        return self._shard is not None

    def tell_failure(self, error: BaseException) -> None:
        """The other ranks wait in vain for this one's directions."""
        if self._shard is not None and not isinstance(error, PeerError):
            shard, failures = self._shard, self._shard.failures
            why = f"{shard.name(shard.rank)} failed in optimizer.step(): {name_error(error)}"
            failures.note(shard.ranks[shard.rank], why)  # close() tells this cause, then
            failures.tell(why)

    def empty(self, chunk: Chunk, on_device: bool) -> torch.Tensor:
        """New memory, bf16, flat, for the directions of this rank's shard of the chunk."""
        device = self._device if on_device else torch.device("cpu")
        numel = chunk.slots * self._layout.tile_numel
        return torch.empty(numel, dtype=torch.bfloat16, device=device)

    @torch.no_grad()
    def orthogonalize(
        self, directions: torch.Tensor, matrices: Sequence[tuple[ManagedParam, Options]]
    ) -> None:
        """Replaces the directions of a chunk by orthogonal ones.

        Args:
            directions: of this rank's shard of the chunk, bf16, flat.
            matrices: the parameters of the chunk that have directions, and their options; the same
                on all ranks.

        Raises PeerError.
        """
        if self._shard is not None:
            self._over_ranks(self._shard, directions, matrices)
            return
        for managed, options in matrices:
            part = directions[managed.in_shard(self._layout)[0]]
            part.copy_(self._orthogonal(part, managed, options))

    def _orthogonal(
        self, direction: torch.Tensor, managed: ManagedParam, options: Options
    ) -> torch.Tensor:
        """A whole matrix's direction, flat."""
        matrix = direction.view(managed.param.shape).to(self._device, copy=True)
        made = newton_schulz(
            matrix, options["ns_coefficients"], options["ns_steps"], options["eps"]
        )
        return made.reshape(-1)

    def _over_ranks(
        self,
        shard: Communicator,
        directions: torch.Tensor,
        matrices: Sequence[tuple[ManagedParam, Options]],
    ) -> None:
        owned = _dealt(matrices, shard.size)
        mine = owned[shard.rank]
        # To each owner this rank's parts of its matrices.
        received = self._exchange(
            shard,
            [[directions[self._where(m)[0]] for m, _ in theirs] for theirs in owned],
            [[self._length(m, peer) for m, _ in mine] for peer in range(shard.size)],
            "the directions of Muon",
        )
        wholes = []
        for i, (m, options) in enumerate(mine):
            whole = torch.empty(m.numel, dtype=torch.bfloat16, device="cpu")
            for peer in range(shard.size):
                whole[self._where(m, peer)[1]] = received[peer][i]
            wholes.append((m, self._orthogonal(whole, m, options).cpu()))
        # And back.
        received = self._exchange(
            shard,
            [[whole[self._where(m, peer)[1]] for m, whole in wholes] for peer in range(shard.size)],
            [[self._length(m, shard.rank) for m, _ in theirs] for theirs in owned],
            "the orthogonal directions of Muon",
        )
        for theirs, parts in zip(owned, received, strict=True):
            for (m, _), part in zip(theirs, parts, strict=True):
                directions[self._where(m)[0]] = part.to(directions.device)

    def _where(self, managed: ManagedParam, rank: int | None = None) -> tuple[slice, slice]:
        return managed.in_shard(self._layout, rank)

    def _length(self, managed: ManagedParam, rank: int) -> int:
        part = self._where(managed, rank)[1]
        return int(part.stop - part.start)

    def _exchange(
        self,
        shard: Communicator,
        parts: Sequence[Sequence[torch.Tensor]],
        lengths: Sequence[Sequence[int]],
        what: str,
    ) -> list[list[torch.Tensor]]:
        """Sends each rank its `parts`, and returns what each has sent, of these `lengths`."""
        receives = [
            [torch.empty(length, dtype=torch.bfloat16, device="cpu") for length in some]
            for some in lengths
        ]
        shard.exchange(parts, receives, what)
        return receives


def newton_schulz(
    matrix: torch.Tensor, coefficients: Sequence[float], steps: int, eps: float
) -> torch.Tensor:
    """An orthogonal matrix near `matrix`: U V^T of its singular value decomposition U S V^T.

    Nearly: the iteration of Jordan et al. ("Muon: An optimizer for hidden layers in neural
    networks", 2024) goes on where singular values are between about 0.7 and 1.2. Operators and
    their order, and so the bits, are those of torch.optim.Muon.

    Args:
        matrix: 2-D, bf16; it may be overwritten.
        coefficients: a, b, c of the polynomial a x + b x^3 + c x^5 of each singular value.
        steps: how often it is applied.
        eps: the smallest norm by which the matrix is divided at first.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix  # the products are of the smaller side
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _dealt(
    matrices: Sequence[tuple[ManagedParam, Options]], ranks: int
) -> list[list[tuple[ManagedParam, Options]]]:
    """The matrices that each rank owns: the largest go first, each to the rank with least work."""
    owned: list[list[tuple[ManagedParam, Options]]] = [[] for _ in range(ranks)]
    work = [0] * ranks
    for matrix in sorted(matrices, key=lambda pair: (-_work(pair[0]), pair[0].slice.offset)):
        rank = work.index(min(work))
        owned[rank].append(matrix)
        work[rank] += _work(matrix[0])
    return owned


def _work(managed: ManagedParam) -> int:
    """What the products of a matrix cost, in units of a step of the iteration."""
    return int(managed.numel * min(managed.param.shape))
