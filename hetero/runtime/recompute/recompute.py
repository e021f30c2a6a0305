"""Blocks of an engine's model that are computed again in backward, as its options want.

Bytes alone decide, so ranks whose inputs have the same shapes decide alike, and each step as the
one before. In a first forward
nobody knows what it saves, so every call is made again whose kind was seen. Then the earliest calls
are, as many as it takes for what is saved to fit where compute happens: backward needs the last
ones first, and frees what they have kept before it computes another one again.
"""

from __future__ import annotations

import difflib
import pickle
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch

from hetero.activations.store import ActivationStore
from hetero.chunk_groups.chunk_group import Shared
from hetero.runtime.modules.param_registry import ParamRegistry
from hetero.runtime.modules.saved_tensors import SavedTensors
from hetero.runtime.recompute.repeatable_call import (
    Arguments,
    CallState,
    RepeatableCall,
    Surroundings,
    version_of,
)
from offload.errors import HeteroError
from offload.memory.sizes import format_bytes

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


@dataclass(frozen=True)
class CallCost:
    """What one call of a block saves.

    Attributes:
        saved_bytes: for backward if it is not computed again, its input included as far as nothing
            else has saved that.
        size_bytes: of its input, which alone is saved if it is.
        is_repeatable: whether it can be computed again.
    """

    saved_bytes: int
    size_bytes: int
    is_repeatable: bool = True


def choose(calls: Sequence[CallCost], kept_bytes: float, share: float = 1.0) -> list[bool]:
    """By call of one forward, in their order, whether it is computed again.

    Args:
        calls: as they were for other inputs.
        kept_bytes: what they may keep together where compute happens; less than 0 if others need
            more.
        share: how many times as large the inputs are now.
    """
    excess = share * sum(call.saved_bytes for call in calls) - kept_bytes
    chosen = []
    for call in calls:
        again = excess > 0 and call.is_repeatable
        if again:
            excess -= share * (call.saved_bytes - call.size_bytes)
        chosen.append(again)
    return chosen


@dataclass
class Forward:
    """The calls that one forward of the model has made so far.

    Attributes:
        thread: which makes them; 0: none does.
        began_bytes: what all forwards had saved for backward when it began.
        held_bytes: what other graphs kept where compute happens when it began.
        costs: of each call.
        recomputed: whether it is computed again.
        in_calls_bytes: what was saved in calls.
        other_bytes: what was saved beside them, by the model's head and loss, say; None: it has not
            ended.
    """

    thread: int = 0
    began_bytes: int = 0
    held_bytes: int = 0
    costs: list[CallCost] = field(default_factory=list)
    recomputed: list[bool] = field(default_factory=list)
    in_calls_bytes: int = 0
    other_bytes: int | None = None

    def add(self, cost: CallCost, recomputed: bool, saved_bytes: int) -> None:
        """Another call, in which so many bytes were saved."""
        self.costs.append(cost)
        self.recomputed.append(recomputed)
        self.in_calls_bytes += saved_bytes

    def end(self, saved_bytes: int) -> None:
        """No more calls come; all forwards have saved so many bytes now."""
        self.other_bytes = max(0, saved_bytes - self.began_bytes - self.in_calls_bytes)


_Key = tuple[int, Hashable]  # a block's kind, and its calls' kind
_DIFFERED = "they have saved other values when they were"
_MORE_BYTES = 1 << 30


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
        is_all: bool,
        notes: list[str],
    ) -> None:
        """Replaces the blocks' calls until remove().

        Args:
            blocks: of the model.
            params: all managed ones.
            saved_tensors: the hooks without which nothing is computed again.
            activations: has what the blocks save.
            is_all: all calls are computed again that can be.
            notes: lines for the user, to append to.
        """
        self.blocks = blocks
        self._params = params
        self._saved_tensors = saved_tensors
        self._activations = activations
        self._is_all = is_all
        self._notes = notes
        # By kind, the latest cost that was seen of a call that was not to be computed again.
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
        self._activations.recomputes = any(self.latest.recomputed)

    def _recomputes(self, size_bytes: int) -> bool:
        """Whether the forward's next call is computed again, given the size of its input.

        By the forward before this one. Of the first one nobody knows what it saves beside blocks.
        """
        latest, number = self.latest, len(self._forward.costs)
        if self._is_all or latest.other_bytes is None:
            return True
        one = latest.costs[min(number, len(latest.costs) - 1)].size_bytes
        share = size_bytes / one if one else 1.0
        chosen = choose(latest.costs, self._room(share * latest.other_bytes), share)
        # More calls than there were, of a model whose depth changes: what saves most bytes.
        return chosen[number] if number < len(chosen) else any(chosen)

    def _room(self, other_bytes: float) -> float:
        """What calls may keep where compute happens beside `other_bytes`, and other graphs."""
        return self._activations.keepable_bytes - other_bytes - self._forward.held_bytes

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
        again = seen is not None and self._recomputes(size_bytes)
        if again and not is_repeatable:
            if arguments.odd_one is not None:
                self._note(
                    f"{block.name} and blocks like it are not computed again in backward, because "
                    f"they are given a {type(arguments.odd_one).__name__}, which may have changed "
                    f"by then; for a cache of transformers, set model.config.use_cache = False"
                )
            again = False
        saved_bytes, unchanged = self._activations.counts.saved_bytes, _Unchanged(module, arguments)
        try:
            if again:
                call = self._repeatable_call(block, plain, arguments, state)
                output = call.unkept(plain, args, kwargs)
            else:
                output = plain(*args, **kwargs)
            if key not in self._never:
                why = self._changed(module, state, unchanged, is_first=seen is None)
                if why is not None:
                    is_repeatable = False
                    self._keep_from_now_on(block, key, why)
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
        cost = CallCost(saved_bytes, size_bytes, is_repeatable)
        if again:  # what it saves otherwise was seen in another call
            assert seen is not None
            share = size_bytes / seen.size_bytes if seen.size_bytes else 1.0
            cost = CallCost(int(seen.saved_bytes * share), size_bytes)
        else:
            self._seen[key] = cost
        if forward is self._forward:
            forward.add(cost, again, saved_bytes)
        return output

    def _repeatable_call(
        self,
        block: Block,
        plain: Callable[..., Any],
        arguments: Arguments,
        state: CallState,
    ) -> RepeatableCall:
        module = block.module()
        assert module is not None
        surroundings = Surroundings(module)

        def again(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            module = block.module()
            assert module is not None
            try:
                with surroundings.put_back(module):
                    plain(*args, **kwargs)
            finally:
                state.check(block.name, module, self._params.known, self._steps)

        def differed() -> HeteroError:
            self._keep_from_now_on(block, (block.kind, state.kind), _DIFFERED)
            return HeteroError(
                f"{block.name} was computed again in backward (option recompute), and saves other "
                f"values than it did in forward: it depends on something that is another one by "
                f"now, an option outside of its modules, say; give recompute='none', or change "
                f"nothing between forward and backward"
            )

        return RepeatableCall(arguments, self._saved_tensors, again, differed)

    def _changed(
        self, module: torch.nn.Module, state: CallState, unchanged: _Unchanged, is_first: bool
    ) -> str | None:
        """Why a call that was made, the first of its kind perhaps, must not be made again; None: it
        may be."""
        if state.has_changed(module, self._params.known):
            return "their forward changes its parameters in place"
        # oneDNN's saves memory of its own, parts of which nothing has written: no two calls have
        # the same bytes there.
        if is_first and any(isinstance(each, torch.nn.LSTM) for each in module.modules()):
            return "what an LSTM keeps for backward is not the same each time"
        return unchanged.why_not()

    def _keep_from_now_on(self, block: Block, key: _Key, why: str) -> None:
        """No call like this one of the block is computed again, because of `why`."""
        self._never.add(key)
        self._note(f"{block.name} and blocks like it are not computed again in backward: {why}")

    def _note(self, line: str) -> None:
        # Once, and not for each block: the name comes first.
        if not any(line.split(" ", 1)[1] in other for other in self._notes):
            self._notes.append(line)

    def words(self) -> str:
        """For people: how many calls are computed again, and what more memory would change."""
        forward = self.latest
        if not forward.costs:
            return (
                "No call of a block was seen yet that could be computed again in backward; those "
                "under torch.compile, in checkpoints, and in other threads than the forward's "
                "never are."
            )
        again, calls = sum(forward.recomputed), len(forward.costs)
        saved = sum(cost.saved_bytes for cost in forward.costs) // calls
        inputs = sum(cost.size_bytes for cost in forward.costs) // calls
        found = (
            f"Of {calls} calls of blocks {again} are computed again in backward; one saves about "
            f"{format_bytes(saved)}, its input has {format_bytes(inputs)}."
        )
        if self._is_all or not again:
            return found
        more = choose(forward.costs, self._room(forward.other_bytes or 0) + _MORE_BYTES)
        return f"{found} With one more GiB for activations it would be {sum(more)}."

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
        self._attributes = [(each, _attributes(each)) for each in module.modules()]
        self._versions = arguments.versions

    def why_not(self) -> str | None:
        """What it has changed; None: nothing."""
        now = list(self._module.buffers())
        same_buffers = len(now) == len(self._buffers) and all(
            new is old and version_of(new) == version
            for new, (old, version) in zip(now, self._buffers, strict=True)
        )
        if not same_buffers or self._arguments.versions != self._versions:
            return (
                "their forward changes its buffers (running statistics, say) or its input in place"
            )
        for module, before in self._attributes:
            for name, (value, parts) in _attributes(module).items():
                if name not in before or value is not before[name][0] or parts != before[name][1]:
                    return f"their forward changes self.{name}, which would be changed twice"
        return None


_OF_ALL_MODULES = frozenset(vars(torch.nn.Module())) - {"training"}
_ATOMS = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))


def _attributes(module: torch.nn.Module) -> dict[str, tuple[Any, Hashable]]:
    """A module's own attributes, each with what a forward may change in it."""
    own = vars(module).items()
    return {name: (value, _parts(value)) for name, value in own if name not in _OF_ALL_MODULES}


def _parts(value: Any) -> Hashable:
    """What tells whether a container or a generator of random numbers was changed in place.

    Parts of a container count as the same as long as they are the same objects, which tensors are
    until they are written to.
    """
    kind = type(value)
    if kind in _ATOMS:  # most are, and this is asked before and after each call of a block
        return None
    if isinstance(value, torch.Generator):
        return bytes(value.get_state())
    if isinstance(value, random.Random):
        return value.getstate()
    if kind.__module__.startswith("numpy.random"):  # its old kind and its new one
        bits = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", value)
        return pickle.dumps(bits.state)
    if isinstance(value, dict):
        return tuple(map(_Element, (*value, *value.values())))
    if isinstance(value, list | set | deque):
        return tuple(map(_Element, value))
    return None


class _Element:
    """An object in a container, which this keeps alive, so that no other one gets its address."""

    def __init__(self, each: Any) -> None:
        self._each = each
        # A parameter's own version falls when a speculative update of it is taken back, as its use
        # in the call may do; CallState compares parameters.
        has_version = isinstance(each, torch.Tensor) and not isinstance(each, torch.nn.Parameter)
        self._version = version_of(each) if has_version else 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Element):
            return NotImplemented
        return self._each is other._each and self._version == other._version

    __hash__ = object.__hash__


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


def take_over_blocks(
    model: torch.nn.Module,
    params: ParamRegistry,
    shared: Shared,
    saved_tensors: SavedTensors,
    activations: ActivationStore | None,
) -> BlockCalls | None:
    """Takes over the calls of the model's blocks, as the option recompute says; None: of none.

    Raises ValueError if a pattern of the option fits no module, or activations have no budget.
    """
    mode = shared.config.recompute
    if activations is None and mode not in ("auto", "none"):
        raise ValueError(
            f"recompute={mode!r} computes blocks again in backward only where what autograd "
            f"saves has a budget; also give activation_memory ('auto' is enough)"
        )
    if activations is None or mode == "none":
        return None
    blocks = find_blocks(model, None if isinstance(mode, str) else mode)
    if not blocks:
        return None
    return BlockCalls(blocks, params, saved_tensors, activations, mode == "all", shared.notes)
