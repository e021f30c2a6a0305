"""Manifests of checkpoints that were changed, with checksums that are right again."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import strategies as st

from offload._native import crc32c


def checksummed(content: Any) -> bytes:
    """The object as a file whose checksum is right."""
    content = {**content, "crc32c": "00000000"} if isinstance(content, dict) else content
    text = json.dumps(content).encode()
    memory = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    crc = f'"crc32c": "{crc32c(memory.data_ptr(), len(text)):08x}"'.encode()
    return text.replace(b'"crc32c": "00000000"', crc, 1)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every member, at any depth; of long lists to the first ones."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:5])
    for key, each in items:
        yield (*at, key)
        if isinstance(each, (dict, list)):
            yield from places(each, (*at, key))


ODD = [None, True, False, 0, 1, -1, 1.0, 1.5, 2**31, 2**53 + 1, 2**62, 2**64, 10**400, 1e300]
ODD += ["", "x", "..", "../x", "/etc/passwd", "a/b", "\0", "\ud800", "float32", "qint8", "9" * 5000]
ODD += [[], {}, [[]], ["float32", 2**62, 2**62], ["float32", *[1] * 100], {"a": {}}, [1, "a"]]


def with_odd_members(sample: bytes) -> Iterator[Any]:
    """The manifest with each member replaced by a third of ODD, by turns; mutations() has all."""
    for number, way in enumerate(places(json.loads(sample))):
        for odd in ODD[number % 3 :: 3]:
            content = json.loads(sample)
            inner = content
            for key in way[:-1]:
                inner = inner[key]
            inner[way[-1]] = odd
            yield content


VALUES = st.one_of(
    st.sampled_from(ODD),
    st.integers(),
    st.text(alphabet=st.characters(), max_size=4),
    st.recursive(st.integers(), lambda s: st.lists(s, max_size=3), max_leaves=4),
)


@st.composite
def mutations(draw: Any, sample: bytes) -> Any:
    """A manifest with some members replaced, deleted, renamed, doubled or exchanged."""
    content = json.loads(sample)
    ways = list(places(content))
    for _ in range(draw(st.integers(1, 3))):
        way = draw(st.sampled_from(ways))
        inner = content
        try:
            for key in way[:-1]:
                inner = inner[key]
            last = inner[way[-1]]
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change has taken it away
        if not isinstance(inner, (dict, list)):
            continue
        what = draw(st.sampled_from(["replace", "delete", "rename", "exchange"]))
        if what == "replace":
            inner[way[-1]] = copy.deepcopy(draw(VALUES))
        elif what == "delete":
            del inner[way[-1]]
        elif what == "rename" and isinstance(inner, dict):
            odd_names = st.sampled_from([odd for odd in ODD if isinstance(odd, str)])
            name = draw(st.one_of(odd_names, st.text()))
            inner[name] = inner.pop(way[-1])
        elif what == "exchange":
            other = draw(st.sampled_from(sorted(map(str, content))))
            if other in content and other != "crc32c":
                inner[way[-1]], content[other] = copy.deepcopy(content[other]), last
    return content
