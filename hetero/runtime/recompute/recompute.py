"""Blocks of an engine's model that are computed again in backward, as its options want."""

from __future__ import annotations

import difflib
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from hetero.activations.store import ActivationStore
from hetero.chunk_groups.chunk_group import Shared
from hetero.runtime.learned_rates import Counters
from hetero.runtime.modules.param_registry import ParamRegistry
from hetero.runtime.modules.saved_tensors import SavedTensors
from hetero.runtime.recompute.call_record import (
    Arguments,
    CallState,
    Reach,
    Surroundings,
    version_of,
)
from hetero.runtime.recompute.policy import CallCost, Expected, Forward, RecomputePolicy, SeenStep
from hetero.runtime.recompute.repeatable_call import RepeatableCall
from hetero.runtime.step_tracer import MeasuredStep
from offload.errors import HeteroError

_CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential)


@dataclass(frozen=True)
class Block:
    """A module whose call can be computed again as a whole.

    Attributes:
        name: in the model.
        module: not kept alive.
        kind: the same number for blocks of one class whose modules are of the same classes, and
            whose parameters have the same shapes.
    """

    name: str
    module: weakref.ref[torch.nn.Module]
    kind: int


def find_blocks(model: torch.nn.Module, patterns: Sequence[str] | None = None) -> list[Block]:
    """The model's blocks, in its order; none of them is inside another one.

    They are the children of a ModuleList or a Sequential that have children themselves, and of
    which at least two are alike, and with these all of their class: transformer layers, residual
    blocks, of which the first one is often another one than the rest. (Alike layers without
    children, as Linear, are no blocks: to compute them again saves next to nothing.)

    Args:
        model: any.
        patterns: of names; the modules that fit one are the blocks, whatever they are.

    Raises:
        ValueError: a pattern fits no module's name.
    """
    chosen = _repeated(model) if patterns is None else _named(model, patterns)
    kinds: dict[Hashable, int] = {}
    return [
        Block(name, weakref.ref(module), kinds.setdefault(_kind(module), len(kinds)))
        for name, module in _outermost(chosen)
    ]


def _repeated(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, _CONTAINERS):
            children = [(n, c) for n, c in module.named_children() if next(c.children(), None)]
            likenesses = [_likeness(child) for _, child in children]
            classes = {
                type(child)
                for (_, child), likeness in zip(children, likenesses, strict=True)
                if likenesses.count(likeness) > 1
            }
            for (own, child), likeness in zip(children, likenesses, strict=True):
                # Containers of one class have no more in common than that.
                is_of_class = type(child) in classes and type(child) not in _CONTAINERS
                if is_of_class or likenesses.count(likeness) > 1:
                    yield f"{name}.{own}" if name else own, child


def _named(
    model: torch.nn.Module, patterns: Sequence[str]
) -> Iterator[tuple[str, torch.nn.Module]]:
    named = [(name, module) for name, module in model.named_modules() if name]
    names = [name for name, _ in named]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(f"recompute: no module has a name like {pattern!r}{hint}")
    for name, module in named:
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            yield name, module


def _outermost(
    named: Iterator[tuple[str, torch.nn.Module]],
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Those that are inside no earlier one, which have come before them, each once."""
    inside: set[int] = set()
    for name, module in named:
        if id(module) not in inside:
            inside |= {id(part) for part in module.modules()}
            yield name, module


def _likeness(module: torch.nn.Module) -> Hashable:
    """The same for modules that compute alike."""
    shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
    return type(module), shapes


def _kind(module: torch.nn.Module) -> Hashable:
    """The same for modules that compute alike in all of their parts."""
    return _likeness(module), tuple(map(type, module.modules()))


_Key = tuple[int, Hashable]  # a block's kind, and its calls' kind
_DIFFERED = "they have saved other values when they were"


class CallKinds:
    """What calls of each kind have shown: their costs, and which must not be made again.

    Attributes:
        seen: by kind, the latest that was seen of a call that was not to be computed again.
    """

    def __init__(self, notes: list[str]) -> None:
        """None was seen. `notes` are lines for the user, to append to."""
        self.seen: dict[_Key, CallCost] = {}
        self._never: set[_Key] = set()  # kinds that change something when they are computed again
        self._notes = notes

    def may_repeat(self, key: _Key) -> bool:
        """Whether no call of this kind has changed something."""
        return key not in self._never

    def keep_from_now_on(self, block: Block, key: _Key, why: str) -> None:
        """No call like this one of the block is computed again, because of `why`."""
        self._never.add(key)
        self._note(f"{block.name} and blocks like it are not computed again in backward: {why}")

    def note_odd(self, block: Block, arguments: Arguments, expected: Expected, room: int) -> None:
        """Says why a call cannot be made again, where that would save something."""
        odd = arguments.odd_one
        if odd is not None and sum(cost.saved_bytes for cost in expected.costs) > room:
            self._note(
                f"{block.name} and blocks like it are not computed again in backward, because they "
                f"are given a {type(odd).__name__}, which may have changed by then; for a cache of "
                f"transformers, set model.config.use_cache = False"
            )

    def _note(self, line: str) -> None:
        # Once, and not for each block: the name comes first.
        if not any(line.split(" ", 1)[1] in other for other in self._notes):
            self._notes.append(line)


class BlockCalls:
    """Makes the calls of blocks, as decided for each, and knows what they have cost.

    A call is left as it is where recomputing is somebody else's matter, or nobody's: inside a
    checkpoint or save_on_cpu(), without gradients, under torch.compile or torch.func, in another
    thread than the forward's.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        params: ParamRegistry,
        saved_tensors: SavedTensors,
        activations: ActivationStore,
        policy: RecomputePolicy,
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
        self._kinds = CallKinds(notes)
        self._generators: dict[str, list[Any]] = {}  # by block, those of random numbers
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
        self._forward = Forward(threading.get_ident(), store.counts.saved_bytes, store.kept_bytes)

    def end_forward(self) -> None:
        """No more calls of the forward come."""
        if self._forward.costs:
            self._forward.end(self._activations.counts.saved_bytes)
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
        by_kind = {kind: cost for (kind, _), cost in self._kinds.seen.items()}
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
        seen, size_bytes = self._kinds.seen.get(key), arguments.size_bytes
        is_repeatable = self._kinds.may_repeat(key) and arguments.odd_one is None
        again, reach = False, None
        if seen is None or block.name not in self._generators:
            reach = Reach(module)
            self._generators[block.name] = reach.generators
        if seen is not None:
            expected = self._expected()
            again = is_repeatable and self._policy.recomputes(
                len(forward.costs), size_bytes, expected
            )
            room = self._activations.keepable_bytes
            self._kinds.note_odd(block, arguments, expected, room)
        saved_bytes, waited_s = self._activations.counts.saved_bytes, self._waits_s()
        unchanged = _Unchanged(module, arguments)
        surroundings = call = None
        if again or seen is None:
            surroundings = Surroundings(module, self._generators[block.name])
            call = self._repeatable_call(block, plain, arguments, state, surroundings)
        began_s = time.perf_counter()
        try:
            if call is None:
                output = plain(*args, **kwargs)
            else:
                output = (call.unkept if again else call.kept)(plain, args, kwargs)
            forward_s = time.perf_counter() - began_s - (self._waits_s() - waited_s)
            if surroundings is not None:
                surroundings.settle(module)
            if self._kinds.may_repeat(key):
                why = self._changed(module, state, unchanged, reach)
                if why is None and call is not None and not again and is_repeatable:
                    why = self._tried(block, call)
                if why is not None:
                    is_repeatable = False
                    self._kinds.keep_from_now_on(block, key, why)
                    if again:
                        raise HeteroError(
                            f"{block.name} was to be computed again in backward (option "
                            f"recompute), as blocks like it that had been watched, but {why}. "
                            f"Call the model again, which keeps what they save, or give "
                            f"recompute='none'"
                        )
        except BaseException:
            self._forward = Forward()  # what it has shown is no forward's
            raise
        saved_bytes = self._activations.counts.saved_bytes - saved_bytes
        cost = CallCost(saved_bytes, size_bytes, forward_s, size_bytes, is_repeatable)
        if again:  # what it saves otherwise was seen in another call
            assert seen is not None
            share = size_bytes / seen.size_bytes if seen.size_bytes else 1.0
            cost = replace(seen.times(share), forward_s=forward_s, is_repeatable=is_repeatable)
        else:
            self._kinds.seen[key] = cost
        if forward is self._forward:
            forward.add(cost, again, saved_bytes)
        return output

    def _repeatable_call(
        self,
        block: Block,
        plain: Callable[..., Any],
        arguments: Arguments,
        state: CallState,
        surroundings: Surroundings,
    ) -> RepeatableCall:
        def again(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            module = block.module()
            assert module is not None
            try:
                with surroundings.put_back(module):
                    plain(*args, **kwargs)
            finally:
                state.check(block.name, module, self._params.known, self._steps)

        def differed() -> HeteroError:
            self._kinds.keep_from_now_on(block, (block.kind, state.kind), _DIFFERED)
            return HeteroError(
                f"{block.name} was computed again in backward (option recompute), and saves other "
                f"values than it did in forward: it depends on something that is another one by "
                f"now, an option outside of its modules, say; give recompute='none', or change "
                f"nothing between forward and backward"
            )

        return RepeatableCall(arguments, self._saved_tensors, again, differed)

    def _changed(
        self,
        module: torch.nn.Module,
        state: CallState,
        unchanged: _Unchanged,
        reach: Reach | None,
    ) -> str | None:
        """Why a call that was made must not be made again; None: it may be."""
        if not unchanged.still():
            return (
                "their forward changes its buffers (running statistics, say) or its input in place"
            )
        if reach is not None and reach.changed is not None:
            return f"their forward changes {reach.changed}, which would be changed twice"
        if reach is not None and reach.iterator is not None:
            return f"{reach.iterator} is an iterator, which cannot go back"
        if state.has_changed(module, self._params.known):
            return "their forward changes its parameters in place"
        return None

    def _tried(self, block: Block, call: RepeatableCall) -> str | None:
        """Makes the first call of a kind again at once: why no other one must be; None: it may.

        Raises HeteroError if it has given other values, and may have changed what later calls
        depend on.
        """
        if not call.is_known:
            return "they save tensors whose bits cannot be compared, sparse ones say"
        if call.gives_the_same():
            return None
        # On a device an operation may add in another order each time.
        if call.is_in_ram or torch.are_deterministic_algorithms_enabled():
            raise HeteroError(
                f"{block.name} has saved other values when it was called twice with the same "
                f"arguments, random numbers and options, so hetero cannot compute it again in "
                f"backward, and cannot tell what the second call has changed; give "
                f"recompute='none', or draw from a torch.Generator, numpy or random"
            )
        return _DIFFERED

    def _is_ours(self) -> bool:
        return (
            torch.is_grad_enabled()
            and self._forward.thread == threading.get_ident()
            and torch._C._current_graph_task_id() == -1
            and torch._C._functorch.peek_interpreter_stack() is None
            and self._saved_tensors.are_alone
        )


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


class Recompute:
    """Has the calls of blocks decided, measured, and chosen anew when steps have shown more."""

    def __init__(
        self,
        model: torch.nn.Module,
        params: ParamRegistry,
        shared: Shared,
        saved_tensors: SavedTensors,
        activations: ActivationStore | None,
    ) -> None:
        """Takes over the calls of the model's blocks until close(), if activations have a budget.

        Raises ValueError if a pattern of the option fits no module, or there is no budget.
        """
        self._calls: BlockCalls | None = None
        mode = shared.config.recompute
        if activations is None and mode not in ("auto", "none"):
            raise ValueError(
                f"recompute={mode!r} computes blocks again in backward only where what autograd "
                f"saves has a budget; also give activation_memory ('auto' is enough)"
            )
        if activations is None or mode == "none":
            return
        self._activations = activations
        self._is_separate = shared.backend.separate
        self._waited = 0.0, 0.0  # by the activations, until the last step's end
        self._moved_bytes = 0  # of activations, likewise
        chunk_groups = params.chunk_groups
        self._policy = RecomputePolicy(mode, activations, chunk_groups[0].world.agree)

        def waits_s() -> float:
            own = activations.counts.pack_s + activations.counts.unpack_s
            return own + sum(chunk_group.wait_s for chunk_group in chunk_groups)

        blocks = find_blocks(model, None if isinstance(mode, str) else mode)
        if blocks:
            self._calls = BlockCalls(
                blocks, params, saved_tensors, activations, self._policy, waits_s, shared.notes
            )

    def close(self) -> None:
        """The blocks are called as before; idempotent."""
        if self._calls is not None:
            self._calls.remove()

    def begin_forward(self) -> None:
        """A forward of the whole model begins in this thread."""
        if self._calls is not None:
            self._calls.begin_forward()

    def end_step(self, made: MeasuredStep | None, moved: Counters) -> None:
        """A step is over, which was `made`, or had no forward; `moved` is what one moves of late.

        Raises PeerError if a rank does not come.
        """
        if self._calls is None:
            return
        self._calls.end_step()
        self._activations.recomputes = any(self._calls.latest.recomputed)
        counts = self._activations.counts
        now = counts.pack_s, counts.unpack_s
        packed_s, unpacked_s = (new - old for new, old in zip(now, self._waited, strict=True))
        self._waited = now
        so_far = self._activations.moved_bytes
        moved_bytes = sum(so_far[:2] if self._is_separate else so_far[2:])
        own_bytes, self._moved_bytes = moved_bytes - self._moved_bytes, moved_bytes
        seen = None
        if made is not None:
            seen = SeenStep(
                max(0.0, made.computing.forward_s - packed_s),
                max(0.0, made.computing.backward_s - unpacked_s),
                made.micro_batches,
                moved.h2d_bytes + moved.d2h_bytes if self._is_separate else moved.nvme_bytes,
                moved.h2d_s + moved.d2h_s if self._is_separate else moved.nvme_s,
                own_bytes,
            )
        self._policy.end_step(self._calls.latest, seen)

    def words(self) -> str:
        """For people: what is computed again and why, and what more memory would change; "" if the
        model has no blocks, or none may be computed again."""
        return "" if self._calls is None else self._policy.words(self._calls.latest)
