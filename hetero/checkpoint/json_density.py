"""JSON text that would take far more memory than its size is refused before it is parsed.

An empty list takes two bytes of text and 56 of memory. So a file that was made to harm may take
thirty times its size, and a header or manifest may have 100 MB. What hetero and safetensors write
has a list, an object or a pair of key and value in each 30 bytes or more.
"""

from __future__ import annotations

_BYTES_OF_CONTAINER, _BYTES_OF_PAIR = 16, 14
_FEW = 10_000  # of either, that a text may have besides, in names and in free text


def check_density(text: bytes) -> None:
    """Raises ValueError for more lists, objects or pairs than a text of its size needs.

    Parsing what passes takes at most some 20 times the size of `text`.
    """
    containers, pairs = text.count(b"[") + text.count(b"{"), text.count(b":")
    most_containers = _FEW + len(text) // _BYTES_OF_CONTAINER
    if containers > most_containers or pairs > _FEW + len(text) // _BYTES_OF_PAIR:
        raise ValueError(
            f"its {len(text)} bytes of JSON have {containers} lists and objects and {pairs} pairs "
            f"of key and value, more than a file of hetero or safetensors has"
        )
