"""The corpus that is trained on: bytes, and the seeded order in which they are seen."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch

from hetero.job.ranks import ALONE, Ranks
from offload.memory.sizes import format_bytes

# More text than any run here can see once, and little next to the models' own memory.
CORPUS_CAP_BYTES = 64 << 20

# Installed packages and the standard library's tests say nothing about its own style.
_STDLIB_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


class Corpus:
    """Text as uint8[n], sampled at uniformly random places by a generator of its own.

    The generator is apart from torch's global one, so that the batches do not depend on how many
    random numbers the model's construction drew. Of several ranks each takes, in turn, one batch of
    the order that there is without them.
    """

    def __init__(
        self, text: bytes | bytearray, source: str, seq_len: int, seed: int, ranks: Ranks = ALONE
    ) -> None:
        """Raises ValueError if `text` is shorter than one sequence and one byte."""
        if len(text) == 0:
            raise ValueError(f"no text to train on: {source} is empty")
        if len(text) < seq_len + 1:
            raise ValueError(
                f"{source} holds {len(text)} bytes, but one sequence needs {seq_len + 1}"
                f" (--seq-len {seq_len} and one more); give more text or a smaller --seq-len"
            )
        self.source = source
        self.seq_len = seq_len
        # A bytearray because torch warns about memory that it may not write.
        self._tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._ranks = ranks
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self._tokens.numel()

    @property
    def description(self) -> str:
        return f"{self.source} ({format_bytes(len(self))})"

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Where the order of batches is; the same for any number of ranks."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Goes on from there."""
        self._generator.set_state(state["generator"])

    def batch(self, size: int) -> torch.Tensor:
        """This rank's next `size` sequences: int64[size, seq_len]."""
        starts = [
            torch.randint(len(self) - self.seq_len, (size, 1), generator=self._generator)
            for _ in range(self._ranks.count)
        ]
        return self._tokens[starts[self._ranks.rank] + torch.arange(self.seq_len)].long()


def load_corpus(path: str | None, seq_len: int, seed: int, ranks: Ranks = ALONE) -> Corpus:
    """The text of a file or folder, or of Python's standard library when `path` is None.

    Files of a folder are taken in sorted order, hidden ones left out, up to CORPUS_CAP_BYTES.
    Raises ValueError for a path that is missing, unreadable, empty or too short.
    """
    root = Path(sysconfig.get_path("stdlib") if path is None else path)
    source = f"the text of {root}" if path is None else f"--data {path}"
    if not root.exists():
        raise ValueError(f"{source}: no such file or folder")
    files = [root]
    if root.is_dir():
        found = sorted(root.rglob("*.py" if path is None else "*"))
        files = [file for file in found if file.is_file() and _is_text(file, root, path is None)]
    return Corpus(_read_all(files), source, seq_len, seed, ranks)


def _is_text(file: Path, root: Path, is_stdlib: bool) -> bool:
    parts = file.relative_to(root).parts
    if is_stdlib:
        return _STDLIB_SKIPPED.isdisjoint(parts)
    return not any(part.startswith(".") for part in parts)


def _read_all(files: Iterable[Path]) -> bytearray:
    text = bytearray()
    for file in files:
        room = CORPUS_CAP_BYTES - len(text)
        if room <= 0:
            break
        try:
            with file.open("rb") as stream:
                text += stream.read(room)
        except OSError as error:
            raise ValueError(f"cannot read {file}: {error.strerror}") from error
    return text
