"""Calls of a model's blocks, of which some are computed again in backward."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.utils.checkpoint import checkpoint

from hetero.activations.store import ActivationStore
from hetero.runtime.modules.all_params import AllParams
from hetero.runtime.modules.saved_tensors import SavedTensors
from hetero.runtime.recompute.arguments import Arguments, nest, version_of
from hetero.runtime.recompute.blocks import Block
from hetero.runtime.recompute.call_state import CallState
from hetero.runtime.recompute.choice import CallCost
from hetero.runtime.recompute.forward import Expected, Forward

_Key = tuple[int, Hashable]  # a block's kind, and its calls' kind


class Decides(Protocol):
    """Decides which calls are computed again."""

    def recomputes(self, number: int, size_bytes: int, expected: Expected) -> bool:
        """Whether a call is, given its number in the forward, the size of its input, and what is
        expected of the forward."""


class BlockCalls:
    """Makes the calls of blocks, as decided for each, and knows what they have cost.

    A call is left as it is where recomputing is somebody else's matter, or nobody's: inside a
    checkpoint or save_on_cpu(), without gradients, under torch.compile or torch.func, in another
    thread than the forward's.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        params: AllParams,
        saved_tensors: SavedTensors,
        activations: ActivationStore,
        policy: Decides,
        waits_s: Callable[[], float],
        notes: list[str],
    ) -> None:
        """Replaces the blocks' calls until remove().

        Args:
            blocks: of the model.
            params: all managed ones.
            saved_tensors: the hooks without which nothing is computed again.
            activations: has what the blocks save.
            policy: decides for each call.
            waits_s: seconds for which compute has waited so far; they are no cost of a call.
            notes: lines for the user, to append to.
        """
        self.blocks = blocks
        self._params = params
        self._saved_tensors = saved_tensors
        self._activations = activations
        self._policy = policy
        self._waits_s = waits_s
        self._notes = notes
        # By kind, the latest that was seen of a call that was not to be computed again.
        self._seen: dict[_Key, CallCost] = {}
        self._never: set[_Key] = set()  # kinds that change something when they are computed again
        self._steps = 0  # of the optimizer
        self._forward = Forward()
        self.latest = self._forward  # that has ended
        self._replaced = [_BlockCall(self, block) for block in blocks]
        for call in self._replaced:
            call.put_in_place()

    def remove(self) -> None:
        """The blocks are called as before."""
        while self._replaced:
            self._replaced.pop().remove()

    def begin_forward(self) -> None:
        """A forward of the whole model begins in this thread."""
        self.end_forward()
        for call in self._replaced:
            call.put_in_place()
        store = self._activations
        self._forward = Forward(threading.get_ident(), store.saved_bytes, store.kept_bytes)

    def end_forward(self) -> None:
        """No more calls of the forward come."""
        if self._forward.costs:
            self._forward.end(self._activations.saved_bytes)
            self.latest, self._forward = self._forward, Forward()

    def end_step(self) -> None:
        """The optimizer has made a step."""
        self.end_forward()
        self._steps += 1

    def _expected(self) -> Expected:
        """By the forward before this one; or else by the calls made so far, and one of each block
        that is left."""
        latest, made = self.latest, self._forward
        if latest.costs:
            return Expected(latest.costs, latest.other_bytes, made.held_bytes)
        by_kind = {kind: cost for (kind, _), cost in self._seen.items()}
        later = [by_kind[b.kind] for b in self.blocks[len(made.costs) :] if b.kind in by_kind]
        return Expected(made.costs + later, None, made.held_bytes)

    def call(
        self, block: Block, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What plain(*args, **kwargs) returns."""
        module = block.module()
        assert module is not None
        if not self._is_ours():
            return plain(*args, **kwargs)
        arguments = Arguments(args, kwargs)
        state = CallState.of(module, self._params.known, self._steps)
        if state is None or not (
            any(state.trained) or any(tensor.requires_grad for tensor in arguments.tensors)
        ):
            return plain(*args, **kwargs)
        forward, key = self._forward, (block.kind, state.kind)
        seen, size_bytes = self._seen.get(key), arguments.size_bytes
        is_repeatable = key not in self._never and arguments.odd_one is None
        again = False
        if seen is not None:
            expected = self._expected()
            again = is_repeatable and self._policy.recomputes(
                len(forward.costs), size_bytes, expected
            )
            self._note_odd(block, arguments, expected)
        saved_bytes, waited_s = self._activations.saved_bytes, self._waits_s()
        unchanged = _Unchanged(module, arguments)
        began_s = time.perf_counter()
        try:
            if again:
                output = self._repeatable_call(block, plain, (args, kwargs), arguments, state)
            else:
                output = plain(*args, **kwargs)
        except BaseException:
            self._forward = Forward()  # what it has shown is no forward's
            raise
        forward_s = time.perf_counter() - began_s - (self._waits_s() - waited_s)
        if key not in self._never and not unchanged.still():
            self._never.add(key)
            is_repeatable = False
            self._note(
                f"{block.name} and blocks like it are not computed again in backward, because "
                f"their forward changes its buffers (running statistics, say) or its input in place"
            )
        saved_bytes = self._activations.saved_bytes - saved_bytes
        cost = CallCost(saved_bytes, size_bytes, forward_s, size_bytes, is_repeatable)
        if again:  # what it saves otherwise was seen in another call
            assert seen is not None
            share = size_bytes / seen.size_bytes if seen.size_bytes else 1.0
            cost = replace(seen.times(share), forward_s=forward_s, is_repeatable=is_repeatable)
        else:
            self._seen[key] = cost
        if forward is self._forward:
            forward.add(cost, again, saved_bytes)
        return output

    def _repeatable_call(
        self,
        block: Block,
        plain: Callable[..., Any],
        given: tuple[tuple[Any, ...], dict[str, Any]],
        arguments: Arguments,
        state: CallState,
    ) -> Any:
        """The call, which saves its arguments alone, and is made again when backward needs more."""
        spec, first = arguments.spec, [given]

        def run(*leaves: Any) -> Any:
            if first:  # with the caller's own containers, which the call may fill
                own_args, own_kwargs = first.pop()
                return plain(*own_args, **own_kwargs)
            module = block.module()
            assert module is not None
            own_args, own_kwargs = nest(leaves, spec)
            try:
                with state.restored(module):
                    return plain(*own_args, **own_kwargs)
            finally:
                state.check(block.name, module, self._params.known, self._steps)

        return checkpoint(run, *arguments.leaves, use_reentrant=False)

    def _is_ours(self) -> bool:
        return (
            torch.is_grad_enabled()
            and self._forward.thread == threading.get_ident()
            and torch._C._current_graph_task_id() == -1
            and torch._C._functorch.peek_interpreter_stack() is None
            and self._saved_tensors.are_alone
        )

    def _note_odd(self, block: Block, arguments: Arguments, expected: Expected) -> None:
        """Says why a call cannot be made again, where that would save something."""
        odd = arguments.odd_one
        saved_bytes = sum(cost.saved_bytes for cost in expected.costs)
        if odd is not None and saved_bytes > self._activations.keepable_bytes:
            self._note(
                f"{block.name} and blocks like it are not computed again in backward, because they "
                f"are given a {type(odd).__name__}, which may have changed by then; for a cache of "
                f"transformers, set model.config.use_cache = False"
            )

    def _note(self, line: str) -> None:
        # Once, and not for each block: the name comes first.
        if not any(line.split(" ", 1)[1] in other for other in self._notes):
            self._notes.append(line)


class _Unchanged:
    """What a call must leave as it is, to be made again."""

    def __init__(self, module: torch.nn.Module, arguments: Arguments) -> None:
        self._module, self._arguments = module, arguments
        self._buffers = [(buffer, version_of(buffer)) for buffer in module.buffers()]
        self._versions = arguments.versions

    def still(self) -> bool:
        """Whether it has."""
        now = list(self._module.buffers())
        return (
            len(now) == len(self._buffers)
            and all(
                new is old and version_of(new) == version
                for new, (old, version) in zip(now, self._buffers, strict=True)
            )
            and self._arguments.versions == self._versions
        )


class _BlockCall:
    """What is called in the place of a block.

    It is where module.compile() puts what that has compiled, too, which copies and pickles of the
    module come without.
    """

    def __init__(self, calls: BlockCalls, block: Block) -> None:
        self._calls = calls
        self._block = block
        # What was called until now, if the user has compiled the block.
        self._compiled: Callable[..., Any] | None = None

    def put_in_place(self) -> None:
        """The block's calls come here from now on, also if it was compiled since the last time."""
        module = self._block.module()
        if module is not None and module._compiled_call_impl is not self:
            self._compiled = module._compiled_call_impl
            module._compiled_call_impl = self

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
