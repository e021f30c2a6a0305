"""docs/compatibility.md: a head, the touches that differ, all others, and other projects' names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.compatibility.other_projects import other_projects
from tests.support.compatibility.runs import COLUMNS
from tests.support.compatibility.touches import SECTIONS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "compatibility.md"

_HEAD = """\
# Compatibility

Training code can use a managed model as it uses a plain one, with the exceptions that come first on
this page. A row is one *touch*: a use of a parameter `p`, of a gradient, of the optimizer or of the
model, as plain PyTorch code makes it. {differing} of {all} touches differ from plain PyTorch in at
least one column. [Code written for other projects](#code-written-for-other-projects) comes last.
In short, with the number of touches that differ:

{summary}

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

## Uses that differ
"""
# The differences of each section in a sentence.
_IN_SHORT = {
    "Reads of parameters": "An address, or a new `nn.Parameter` over a managed one, is refused.",
    "Writes to parameters": "With two ranks, parameters are written in `hetero.gathered()`; no "
    "shape changes.",
    "Graphs over parameters": "Functional transforms and tracing take no parameter that is not in "
    "memory; no backward uses values from before a step.",
    "Gradients": "A gradient has no address, and is gone after `zero_grad()`.",
    "Optimizers": "`optimizer.state` has no tensors, `optimizer.state_dict()` has; an engine has "
    "one optimizer.",
    "Modules": "After `initialize` no dtype, vocabulary or parametrization changes; with two ranks "
    "nothing is merged into weights.",
    "State dicts, copies, averages of weights, files": "`assign=True` is refused; with two ranks "
    "averages are copied back in `hetero.gathered()`.",
    "After `engine.close()`": "Parameters have no values.",
}
_SAME = """\
## Uses that give the same

The touches of these tables give what they give in plain PyTorch, in all four columns.
"""


def row_of(name: str, cells: dict[str, str]) -> str:
    """A touch's row."""
    return f"| {name} | " + " | ".join(cells[column] for column in COLUMNS) + " |"


def page_of(cell_of: Callable[[str, str], str]) -> str:
    """The whole page; `cell_of` takes a touch's name and a column's."""
    differing: list[str] = []
    same: list[str] = []
    summary: list[str] = []
    count = all_touches = 0
    for section in SECTIONS:
        rows = {
            touch.name: {column: cell_of(touch.name, column) for column in COLUMNS}
            for touch in section.touches
        }
        others = {name: cells for name, cells in rows.items() if set(cells.values()) != {"same"}}
        count += len(others)
        all_touches += len(rows)
        if others:
            head = ["touch", *COLUMNS]
            lines = [row_of(name, cells) for name, cells in others.items()]
            differing += _table(section.title, head, lines)
            summary.append(f"- {section.title}, {len(others)}: {_IN_SHORT[section.title]}")
        same += _table(
            f"{section.title}: the same" if others else section.title,
            ["touch"],
            [f"| {name} |" for name in rows if name not in others],
        )
    facts = {"differing": str(count), "all": str(all_touches), "summary": "\n".join(summary)}
    head_text = _HEAD
    for name, fact in facts.items():
        head_text = head_text.replace(f"{{{name}}}", fact)
    return "\n".join([head_text, *differing, _SAME, *same, other_projects()])


def _table(title: str, head: list[str], rows: list[str]) -> list[str]:
    """The lines of a table with its title; none without rows."""
    if not rows:
        return []
    return [f"### {title}\n", f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows, ""]


def cells_of(page: str) -> dict[tuple[str, str], str]:
    """The cells of a page by their touch's name and their column."""
    rows = [line[2:-2].split(" | ") for line in page.splitlines() if line.startswith("| ")]
    found = {}
    for name, *cells in rows:
        if not cells and name != "touch":
            cells = ["same"] * len(COLUMNS)
        if len(cells) == len(COLUMNS):
            found.update(((name, c), cell) for c, cell in zip(COLUMNS, cells, strict=True))
    return found
