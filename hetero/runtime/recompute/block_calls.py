"""Calls of a model's blocks, of which some are computed again in backward."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from hetero.activations.store import ActivationStore
from hetero.runtime.modules.saved_tensors import SavedTensors
from hetero.runtime.recompute.blocks import Block
from hetero.runtime.recompute.choice import CallCost

# Arguments that are the same when a call is made again. Others may not be: a cache of keys and
# values has grown by then.
_PLAIN = (
    torch.Tensor,
    int,
    float,
    complex,
    bool,
    str,
    bytes,
    torch.dtype,
    torch.device,
    type(None),
)


class Decides(Protocol):
    """Decides which calls are computed again."""

    def recomputes(self, number: int, input_bytes: int, expected: Sequence[CallCost]) -> bool:
        """Whether a call is, given its number in the forward, the bytes of its input, and what all
        calls of a forward are expected to cost."""


@dataclass
class Forward:
    """The calls that one forward of the model has made so far.

    Attributes:
        thread: which makes them.
        costs: of each call.
        recomputed: whether it is computed again.
    """

    thread: int = 0
    costs: list[CallCost] = field(default_factory=list)
    recomputed: list[bool] = field(default_factory=list)

    @property
    def again_s(self) -> float:
        """Seconds that backward takes to compute forwards again."""
        pairs = zip(self.costs, self.recomputed, strict=True)
        return sum(cost.forward_s for cost, again in pairs if again)


class BlockCalls:
    """Makes the calls of blocks, as decided for each, and knows what they have cost.

    A call is left as it is where recomputing is somebody else's matter, or nobody's: inside a
    checkpoint, without gradients, under torch.compile or torch.func, in another thread than the
    forward's.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        saved_tensors: SavedTensors,
        activations: ActivationStore,
        policy: Decides,
        waits_s: Callable[[], float],
        notes: list[str],
    ) -> None:
        """Replaces the blocks' calls until remove().

        Args:
            blocks: of the model.
            saved_tensors: the hooks without which nothing is computed again.
            activations: has what the blocks save.
            policy: decides for each call.
            waits_s: seconds for which compute has waited so far; they are no cost of a call.
            notes: lines for the user, to append to.
        """
        self.blocks = blocks
        self._saved_tensors = saved_tensors
        self._activations = activations
        self._policy = policy
        self._waits_s = waits_s
        self._notes = notes
        self._by_kind: dict[int, CallCost] = {}  # the latest
        self._never: set[int] = set()  # kinds that change when they are computed again
        self._replaced: list[_BlockCall] = []
        self._forward = Forward()
        self.latest = self._forward  # that has ended
        for block in blocks:
            module = block.module()
            assert module is not None
            # What module.compile() sets, too: copies and pickles of the module come without it.
            call = _BlockCall(self, block, module._compiled_call_impl)
            module._compiled_call_impl = call
            self._replaced.append(call)

    def remove(self) -> None:
        """The blocks are called as before."""
        while self._replaced:
            self._replaced.pop().remove()

    def begin_forward(self) -> None:
        """A forward of the whole model begins in this thread."""
        self.end_forward()
        self._forward = Forward(threading.get_ident())

    def end_forward(self) -> None:
        """No more calls of the forward come."""
        if self._forward.costs:
            self.latest, self._forward = self._forward, Forward()

    def _expected(self) -> list[CallCost]:
        """What the calls of the forward at hand cost, as far as that is known: those of the one
        before it, or else those made so far, and each block that is left once."""
        if self.latest.costs:
            return self.latest.costs
        made = len(self._forward.costs)
        later = [self._by_kind[b.kind] for b in self.blocks[made:] if b.kind in self._by_kind]
        return self._forward.costs + later

    def call(
        self, block: Block, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What plain(*args, **kwargs) returns."""
        if not self._is_ours():
            return plain(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        input_bytes = sum(
            each.nbytes for each in leaves if isinstance(each, torch.Tensor) and each.requires_grad
        )
        number = len(self._forward.costs)
        known = self._by_kind.get(block.kind)
        again = (
            known is not None
            and block.kind not in self._never
            and self._policy.recomputes(number, input_bytes, self._expected())
            and self._is_repeatable(block, leaves)
        )
        saved_bytes, waited_s = self._activations.saved_bytes, self._waits_s()
        began_s = time.perf_counter()
        if again:

            def run(*values: Any) -> Any:
                own_args, own_kwargs = tree_unflatten(values, spec)
                return plain(*own_args, **own_kwargs)

            output = checkpoint(run, *leaves, use_reentrant=False)
        else:
            output = (
                self._watched(block, plain, args, kwargs)
                if known is None
                else plain(*args, **kwargs)
            )
        forward_s = time.perf_counter() - began_s - (self._waits_s() - waited_s)
        cost = CallCost(self._activations.saved_bytes - saved_bytes, input_bytes, forward_s)
        if again:  # what it saves was seen in another call
            assert known is not None
            share = input_bytes / known.input_bytes if known.input_bytes else 1.0
            cost = replace(known.times(share), input_bytes=input_bytes, forward_s=forward_s)
        self._by_kind[block.kind] = cost
        self._forward.costs.append(cost)
        self._forward.recomputed.append(again)
        return output

    def _is_ours(self) -> bool:
        return (
            torch.is_grad_enabled()
            and self._forward.thread == threading.get_ident()
            and torch._C._current_graph_task_id() == -1
            and torch._C._functorch.peek_interpreter_stack() is None
            and self._saved_tensors.hooks(packing=True) is None
        )

    def _is_repeatable(self, block: Block, leaves: Sequence[Any]) -> bool:
        for leaf in leaves:
            if not isinstance(leaf, _PLAIN):
                self._note(
                    f"{block.name} and blocks like it are not computed again in backward, because "
                    f"they are given a {type(leaf).__name__}, which may have changed by then; for "
                    f"a cache of transformers, set model.config.use_cache = False"
                )
                return False
        return True

    def _watched(
        self, block: Block, plain: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """The first call of a kind: if it changes buffers, a second one would change them again."""
        module = block.module()
        assert module is not None
        before = [(buffer, buffer._version) for buffer in module.buffers()]
        output = plain(*args, **kwargs)
        if any(buffer._version != version for buffer, version in before):
            self._never.add(block.kind)
            self._note(
                f"{block.name} and blocks like it are not computed again in backward, because "
                f"their forward changes their buffers (running statistics, say)"
            )
        return output

    def _note(self, line: str) -> None:
        if line not in self._notes:
            self._notes.append(line)


class _BlockCall:
    """What is called in the place of a block."""

    def __init__(
        self, calls: BlockCalls, block: Block, compiled: Callable[..., Any] | None
    ) -> None:
        """`compiled` is what was called until now, if the user has compiled the block."""
        self._calls = calls
        self._block = block
        self._compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._block.module()
        assert module is not None  # it is calling this
        plain = self._compiled or module._call_impl
        if torch.compiler.is_compiling():
            return plain(*args, **kwargs)
        return self._calls.call(self._block, plain, args, kwargs)

    def remove(self) -> None:
        """Puts back what was called before."""
        module = self._block.module()
        if module is not None and module._compiled_call_impl is self:
            module._compiled_call_impl = self._compiled
