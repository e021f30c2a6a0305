"""Examples in sequences, and the micro-batches of a step: padded, or packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hetero.cli.finetune.chat import NOT_LEARNED, Example
from hetero.cli.job.data import MicroBatch
from hetero.cli.job.ranks import ALONE, Ranks

# Sequences that are not full yet, among which a packed example looks for the first with room. More
# of them waste less, and take longer.
_OPEN_SEQUENCES = 64

Row = Sequence[Example]  # the examples of one sequence


def packed(examples: Sequence[Example], seq_len: int) -> Sequence[Row]:
    """Several examples to each sequence of at most `seq_len` tokens: first fit, in their order."""
    rows: list[list[Example]] = []
    room: dict[int, int] = {}  # of each open row, by its number
    for example in examples:
        size = len(example.tokens)
        fitting = (number for number, left in room.items() if left >= size)
        number = next(fitting, None)
        if number is None:
            number = len(rows)
            rows.append([])
            room[number] = seq_len
            if len(room) > _OPEN_SEQUENCES:
                del room[min(room, key=lambda each: room[each])]
        rows[number].append(example)
        if number in room:
            room[number] -= size
    return rows


def stream(texts: Sequence[Sequence[int]], seq_len: int, place: str) -> list[Row]:
    """Texts one after another, cut into sequences of `seq_len` tokens; the rest is left out.

    Raises:
        ValueError: they are shorter than one sequence.
    """
    tokens = [token for text in texts for token in text]
    if len(tokens) < seq_len:
        raise ValueError(
            f"{place} has {len(tokens)} tokens, and a sequence {seq_len}; give more text, or a "
            f"smaller --seq-len"
        )
    rows: list[Row] = []
    for begin in range(0, len(tokens) - seq_len + 1, seq_len):
        row = tokens[begin : begin + seq_len]
        rows.append([Example(row, [NOT_LEARNED, *row[1:]], place)])
    return rows


@dataclass(frozen=True)
class Collation:
    """How sequences become tensors: the padding token, and the dtype of a packed batch's mask.

    `mask_dtype` is the compute dtype: attention adds the mask to its scores. None: each sequence is
    one example, padded.
    """

    pad_token: int
    mask_dtype: torch.dtype | None

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """int64[rows, longest] each, and the mask: int64[rows, longest], 1 for what is no padding;
        or, packed, mask_dtype[rows, 1, longest, longest], 0 where a token (row) sees one (column).
        """
        longest = max(sum(len(example.tokens) for example in row) for row in rows)
        shape = len(rows), longest
        inputs = torch.full(shape, self.pad_token)
        labels = torch.full(shape, NOT_LEARNED)
        places = torch.zeros(shape, dtype=torch.long)
        numbers = torch.zeros(shape, dtype=torch.long)  # of examples in their row, from 1
        for index, row in enumerate(rows):
            begin = 0
            for number, example in enumerate(row, start=1):
                end = begin + len(example.tokens)
                inputs[index, begin:end] = torch.tensor(example.tokens)
                labels[index, begin:end] = torch.tensor(example.labels)
                places[index, begin:end] = torch.arange(end - begin)
                numbers[index, begin:end] = number
                begin = end
        found = {"input_ids": inputs, "labels": labels}
        if self.mask_dtype is None:
            return {**found, "attention_mask": (numbers > 0).long()}
        sees = (numbers[:, :, None] == numbers[:, None, :]).tril()
        mask = torch.zeros(sees.shape, dtype=self.mask_dtype)
        mask.masked_fill_(~sees, torch.finfo(self.mask_dtype).min)
        return {**found, "attention_mask": mask[:, None], "position_ids": places}


class Examples:
    """Sequences, in a seeded order of their own in each epoch.

    Each label of a step counts the same, whichever micro-batch and rank it is in. Of several ranks
    each takes, in turn, one micro-batch of the order that there is without them.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        collation: Collation,
        description: str,
        seed: int,
        per_step: int,
        ranks: Ranks = ALONE,
    ) -> None:
        """`per_step`: how many sequences a step of the run takes, on all ranks together."""
        self.rows = rows
        self.description = description
        self._collation = collation
        self._seed = seed
        self.per_step = per_step
        self._ranks = ranks
        self._next = 0  # of the sequences of all epochs, one after another
        self._order: tuple[int, list[int]] = (-1, [])  # of an epoch

    def state_dict(self) -> dict[str, Any]:
        """Where the order is, and what it is of; the same on all ranks."""
        return {
            "next": self._next,
            "seed": self._seed,
            "sequences": len(self.rows),
            "per_step": self.per_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there.

        Raises:
            ValueError: it is of other data, another seed or steps of another size.
        """
        own = self.state_dict()
        for name in ("seed", "sequences"):
            if state[name] != own[name]:
                raise ValueError(
                    f"the run that is resumed had {name} {state[name]}, and now it is {own[name]}; "
                    f"give the data, --seq-len, --packing and --seed as they were"
                )
        # A run counts its steps, and with others of another size would not see all epochs.
        if state["per_step"] != self.per_step:
            raise ValueError(
                f"the run that is resumed took {state['per_step']} sequences a step, and now it "
                f"would take {self.per_step}; give --batch-size, --grad-accum and ranks whose "
                f"product is {state['per_step']}"
            )
        self._next = int(state["next"])

    def step(self, batch_size: int, accumulate: int) -> list[MicroBatch]:
        """As of TrainingData."""
        count = self._ranks.count
        turns = [
            [self._take(batch_size) for _ in range(count)] for _ in range(accumulate)
        ]  # (by micro-batch, then rank)
        learned = [[sum(e.learned for row in rows for e in row) for rows in turn] for turn in turns]
        total = sum(map(sum, learned))
        found = []
        for turn, counts in zip(turns, learned, strict=True):
            tokens = sum(len(example.tokens) for rows in turn for row in rows for example in row)
            rank = self._ranks.rank
            # Losses are means over the labels of a micro-batch, and gradients are averaged over
            # ranks; this makes both sums over labels, divided by all of them.
            divisor = total / (count * counts[rank])
            found.append(MicroBatch(self._collation(turn[rank]), divisor, tokens))
        return found

    def _take(self, size: int) -> list[Row]:
        found = []
        for _ in range(size):
            epoch, place = divmod(self._next, len(self.rows))
            if self._order[0] != epoch:
                generator = torch.Generator().manual_seed((self._seed + epoch) % 2**63)
                order = torch.randperm(len(self.rows), generator=generator)
                self._order = epoch, order.tolist()
            found.append(self.rows[self._order[1][place]])
            self._next += 1
        return found
