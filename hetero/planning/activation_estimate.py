"""Bytes of what a transformer's layers save for backward, by the formula of their shapes."""

from __future__ import annotations

from dataclasses import dataclass

# Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
# equation 1: a layer saves s b h (34 + 5 a s / h) bytes in 16 bits. The second term is the matrix
# of attention, which scaled_dot_product_attention does not keep; of the 34 bytes an element, 32 are
# 16 numbers and 2 are masks of dropout.
_NUMBERS, _MASK_BYTES = 16, 2


@dataclass(frozen=True)
class ActivationEstimate:
    """Bytes of one micro-batch of a rank; logits and temporaries are not in it.

    Attributes:
        kept_bytes: all layers keep what they save.
        checkpointed_bytes: each keeps its input, and the one that is computed again all it saves.
    """

    kept_bytes: int
    checkpointed_bytes: int

    @classmethod
    def of(cls, layers: int, width: int, tokens: int, element_bytes: int) -> ActivationEstimate:
        """Of so many layers over vectors of `width` elements of `element_bytes`."""
        numbers = tokens * width
        layer = numbers * (_NUMBERS * element_bytes + _MASK_BYTES)
        return cls(layers * layer, layers * numbers * element_bytes + layer)
