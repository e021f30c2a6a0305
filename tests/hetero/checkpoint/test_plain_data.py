"""Plain data: what is packed comes back, and what was made up is a value or a CheckpointError."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import RandomSampler, SequentialSampler

from hetero.checkpoint.plain_data import pack, unpack
from hetero.checkpoint.safetensors_header import DTYPES
from offload.errors import CheckpointError

ALL_DTYPES = sorted(DTYPES.values(), key=str)


def there_and_back(value: Any) -> Any:
    """What comes back after the trip through JSON's text and copies of the tensors."""
    tensors: list[torch.Tensor] = []
    text = json.dumps(pack(value, "value", tensors), allow_nan=False)
    copies = [tensor.detach().cpu().clone() for tensor in tensors]
    return unpack(json.loads(text), "value", copies.__getitem__)


def bits(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.view(tensor.shape).copy_(tensor)
    return bytes(flat.view(torch.uint8).tolist())


def same(found: Any, wanted: Any) -> bool:
    """Equal in class and bits, in the order of dicts, too."""
    if type(found) is not type(wanted):
        return False
    if isinstance(wanted, torch.Tensor):
        like = (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        return like and bits(found) == bits(wanted)
    if isinstance(wanted, (np.ndarray, np.generic)):
        like = (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        return like and found.tobytes() == wanted.tobytes()
    if isinstance(wanted, float):
        return repr(found) == repr(wanted)
    if isinstance(wanted, dict):
        return same(list(found.items()), list(wanted.items()))
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return bool(found == wanted)


@st.composite
def some_tensors(draw: Any) -> torch.Tensor:
    """Of all dtypes: single numbers, empty ones, ones with strides, conjugates that are views."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = draw(st.sampled_from(ALL_DTYPES))
    numel = math.prod(shape)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    top = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, top, (numel * dtype.itemsize,), generator=generator)
    made = raw.to(torch.uint8).view(dtype).view(shape)
    if made.ndim >= 2 and draw(st.booleans()):
        made = made.transpose(0, -1)
    if made.ndim and draw(st.booleans()):
        made = made[::2]
    if dtype is torch.complex64 and draw(st.booleans()):
        made = made.conj()
    return made


ARRAYS = st.one_of(
    st.builds(
        lambda dtype, shape: np.arange(math.prod(shape)).reshape(shape).astype(dtype),
        st.sampled_from(["i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "?"]),
        st.lists(st.integers(0, 3), max_size=3),
    ),
    st.sampled_from([np.float32(1.5), np.int64(-3), np.bool_(True), np.float64("nan")]),
)
KEYS = st.one_of(
    st.text(max_size=5),
    st.sampled_from(["$tuple", "$", "$tensor", "__class__"]),
    st.integers(),
    st.booleans(),
    st.none(),
    st.binary(max_size=3),
    st.floats(allow_nan=False),
    st.tuples(st.integers(), st.text(max_size=2)),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(10**6000), 10**6000),
    st.floats(),
    st.text(),
    st.binary(),
    st.sampled_from([torch.bfloat16, torch.complex128, torch.bool]),
    some_tensors(),
    ARRAYS,
)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
        st.dictionaries(KEYS, st.integers(), max_size=4).map(Counter),
    )


@given(st.recursive(SCALARS, nested, max_leaves=12))
def test_everything_comes_back(value: Any) -> None:
    assert same(there_and_back(value), value)


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {1: v}])
def test_the_deepest_that_is_packed_is_unpacked(wrap: Any) -> None:
    """A level of a dict with other keys than strings takes three of JSON's."""
    value: Any = "end"
    for _ in range(64):
        value = wrap(value)
    assert same(there_and_back(value), value)
    with pytest.raises(ValueError, match="more than 64 levels deep, or contains itself"):
        pack(wrap(value), "value", [])


def test_arrays_that_torch_does_not_take_as_they_are() -> None:
    """Arrays that are read backwards, and those that cannot be written to."""
    backwards = np.arange(5)[::-1]
    fixed = np.arange(3.0)
    fixed.flags.writeable = False
    assert same(there_and_back([backwards, fixed]), [backwards.copy(), fixed])


class OwnInt(int):
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {2, 3}]}, r"value\['a'\]\[1\] is of type builtins.set"),
        ({"f": len}, r"value\['f'\] is of type builtins.builtin_function_or_method"),
        ([defaultdict(int)], r"value\[0\] is of type collections.defaultdict"),
        ([OwnInt(3)], r"value\[0\] is of type .*OwnInt"),
        ({frozenset(): 1}, r"the key frozenset\(\) of value is of type builtins.frozenset"),
        ([np.arange(3, dtype=">i4")], r"value\[0\] is an array of >i4"),
        ({"s": np.array(["a"])}, r"value\['s'\] is an array of <U1"),
        ([np.ma.masked_array([1], [True])], r"value\[0\] is of type numpy.ma"),
        ([np.arange(2.0).astype("c16")], r"value\[0\] is a tensor of torch.complex128"),
        ([torch.zeros(2, dtype=torch.complex128)], r"value\[0\] is a tensor of torch.complex128"),
        ([torch.eye(2).to_sparse()], r"value\[0\] is a tensor without plain memory"),
        ([torch.empty(2, device="meta")], r"value\[0\] is a tensor without plain memory"),
        (["\ud83d\ude00"], r"value\[0\] is .*not Unicode"),
        ({10**5000: len}, r"value\[a large int\] is of type"),
    ],
)
def test_what_is_no_plain_data_is_refused_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(value, "value", [])


# Each has something else in its state: functions, counters, lists, options, other schedulers.
SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=20),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.ConstantLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_states_of_schedulers_come_back(name: str) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    for number in range(4):
        optimizer.step()
        scheduler.step(*([float(number)] if name == "ReduceLROnPlateau" else []))
    states = [scheduler.state_dict(), optimizer.state_dict()]
    assert same(there_and_back(states), states)


def test_other_states_of_torchs() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    sampler = RandomSampler(range(5), generator=torch.Generator().manual_seed(1))
    states = [
        scaler.state_dict(),
        torch.Generator().manual_seed(5).get_state(),
        sampler.generator.get_state(),
        list(SequentialSampler(range(3))),
        nn.BatchNorm1d(3).state_dict(),
        torch.Size([1, 2]),
    ]
    found = there_and_back(states)
    # (What nn.Module notes on the side of its state_dict() is no item of it.)
    assert same(found[:4], states[:4])
    assert same(list(found[4].values()), list(states[4].values()))
    assert found[5] == (1, 2)


TAGS = ["int", "float", "tensor", "numpy", "numpy_scalar", "bytes", "dtype", "tuple", "dict"]
TAGS += ["ordered_dict", "counter", "code", ""]
JSON_KEYS = st.one_of(st.sampled_from([f"${tag}" for tag in TAGS]), st.text(max_size=3))
JSON_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.integers(),
    st.floats(),
    st.text(alphabet=st.characters(), max_size=4),
    st.sampled_from(["nan", "0x10", "-0xff", "bfloat16", "AAA=", "é", "9" * 5000]),
)
JSON = st.recursive(
    JSON_LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(st.lists(inner, min_size=2, max_size=2), max_size=3),
        st.dictionaries(JSON_KEYS, inner, max_size=2),
        st.builds(lambda key, value: {key: value}, JSON_KEYS, inner),
    ),
    max_leaves=25,
)
TENSORS = [torch.ones(()), torch.ones(3), torch.ones(2, dtype=torch.bfloat16), torch.zeros(0, 2)]


@given(JSON)
def test_any_json_is_a_value_or_a_checkpoint_error(packed: Any) -> None:
    def tensor(number: int) -> torch.Tensor:
        if not 0 <= number < len(TENSORS):
            raise CheckpointError("no such tensor")
        return TENSORS[number]

    with contextlib.suppress(CheckpointError):
        unpack(packed, "value", tensor)


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        ({"a": [{"$tuple": 3}]}, r"value\['a'\]\[0\] is no plain data: .tuple of 3, must be of"),
        ({"$code": "exit()"}, "which this version does not know"),
        ({"a": 1, "$tuple": []}, "which this version does not know"),
        ({"$float": "1.5"}, "none of nan, inf and -inf"),
        ({"$int": "0o7"}, "no whole number in hexadecimal digits"),
        ({"$numpy": {"$tensor": 2}}, "is no plain data: .*BFloat16"),
        ({"$numpy_scalar": {"$tensor": 1}}, "a single number has the shape"),
        ({"$dict": [[[1], 2]]}, "unhashable"),
        ({"$dict": [[1, 2, 3]]}, "is no plain data"),
        ({"$counter": {"a": 1}}, "must be of list"),
        ({"$counter": [1]}, "pairs of keys and values are wanted"),
        ({"$bytes": "é"}, "is no plain data"),
        ({"$bytes": [1]}, "must be of str"),
        ({"$tensor": True}, "tensor of True, must be of int"),
        ({"$dtype": "load"}, "no dtype"),
        ([{"$tensor": 1}, {"$tensor": 1}], r"value\[1\] is no plain data: the tensor 1 is there"),
    ],
)
def test_what_pack_does_not_give_is_named(packed: Any, message: str) -> None:
    """A tensor twice, too: many names of one large tensor would make many copies of it."""
    with pytest.raises(CheckpointError, match=message):
        unpack(packed, "value", TENSORS.__getitem__)


@pytest.mark.parametrize("tag", ["$tuple", "a", "$dict"])
def test_deep_nesting_is_an_error(tag: str) -> None:
    packed: Any = []
    for _ in range(400):
        packed = {tag: packed}
    with pytest.raises(CheckpointError, match="nested too deeply"):
        unpack(packed, "value", TENSORS.__getitem__)


def test_keys_of_one_hash_are_refused() -> None:
    """A dict of a million of them, in 25 MB, would take more than an hour."""
    pairs = [[number * (2**61 - 1), 0] for number in range(2000)]
    assert {hash(key) for key, _ in pairs} == {0}
    for tag in ("$dict", "$ordered_dict", "$counter"):
        with pytest.raises(CheckpointError, match="value is no plain data: its keys were chosen"):
            unpack({tag: pairs}, "value", TENSORS.__getitem__)
        assert len(unpack({tag: pairs[:100]}, "value", TENSORS.__getitem__)) == 100


def test_places_cost_nothing_until_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long key with many values below it would else be copied for each of these."""
    made = 0

    def counted(value: Any) -> str:
        nonlocal made
        made += 1
        return repr(value)[:50]

    monkeypatch.setattr("hetero.checkpoint.plain_data.shortened", counted)
    assert unpack({"k" * 1000: [1] * 1000}, "value", TENSORS.__getitem__)
    assert made == 0
