"""docs/compatibility.md: a head, a table for each section of touches, and other projects' names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.compatibility.other_projects import other_projects
from tests.support.compatibility.runs import COLUMNS
from tests.support.compatibility.touches import SECTIONS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "compatibility.md"

_HEAD = """\
# Compatibility

What training code can do with a managed model, and what comes of it. A row is one *touch*: a use
of a parameter `p`, of a gradient, of the optimizer or of the model, as plain PyTorch code makes it.
The columns are four ways to manage a small model:

| column | what it is |
|---|---|
| `cpu` | fp32, one rank, all state in RAM |
| `nvme` | fp32, one rank, the smallest budget that works: parameters are on disk between uses |
| `nvme bf16` | the same in bf16, with exact masters |
| `two ranks` | fp32, two ranks, stage 3: each keeps a half of all chunks, in RAM |

(Three models fit the smallest budget with which they can be built: those with the hooks of
`spectral_norm` before `initialize`, with a convolution, and one that is frozen in part.)

"same" means: the touch gives what it gives on the same model in plain PyTorch, and training goes
on as it does there. Reads of parameters are compared bit for bit; what is computed with gradients
up to rounding (with bf16 that of parameters and gradients to bf16). Otherwise the cell has the
error with its first words; "…" stands for numbers, and for what follows. Where plain PyTorch raises
an error, "same" means an error of the same class. "(at the next step)": the touch itself raises
nothing.

Not in the table, because they read NaN where values are not in memory: `torch.tensor(p)`,
`other.data = p`, compiled TorchScript functions given `p`, and a frozen `p` of no dimensions in the
place of a number (`torch.add(x, y, alpha=p)`). They take a tensor past all that a subclass of it
can see; write `p.detach()` in the place of `p`, which reads true, or use `hetero.gathered()`.

`tests/test_compatibility.py` makes every cell again and compares it with this page;
`python -m tests.support.compatibility` writes the page.
"""


def row_of(name: str, cells: dict[str, str]) -> str:
    """A touch's row."""
    return f"| {name} | " + " | ".join(cells[column] for column in COLUMNS) + " |"


def page_of(cell_of: Callable[[str, str], str]) -> str:
    """The whole page; `cell_of` takes a touch's name and a column's."""
    parts = [_HEAD]
    for section in SECTIONS:
        parts.append(f"## {section.title}\n\n| touch | {' | '.join(COLUMNS)} |")
        parts.append("|---|" + "---|" * len(COLUMNS))
        for touch in section.touches:
            cells = {column: cell_of(touch.name, column) for column in COLUMNS}
            parts.append(row_of(touch.name, cells))
        parts.append("")
    parts.append(other_projects())
    return "\n".join(parts)


def cells_of(page: str) -> dict[tuple[str, str], str]:
    """The cells of a page by their touch's name and their column."""
    rows = [line[2:-2].split(" | ") for line in page.splitlines() if line.startswith("| ")]
    full = (row for row in rows if len(row) == len(COLUMNS) + 1)
    return {
        (row[0], column): cell
        for row in full
        for column, cell in zip(COLUMNS, row[1:], strict=True)
    }
