"""tests/support/documents: what is read from pages, and commands that are found to be wrong."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.support.documents.blocks import blocks_of
from tests.support.documents.commands import check, commands_of

ROOT = Path(__file__).parents[2]
PAGE = """\
Text.

<!-- setup:
a = 1

b = 2
-->
<!-- file: one.py -->
```python
print(a)
```

<!-- not run: needs two GPUs -->

A word between.

```bash
make \\
    test  # all
X=1 hetero train > file
```

    not fenced
"""


def test_blocks(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    python, shell, indented = blocks_of(tmp_path / "page.md")
    assert (python.language, python.text, python.place) == ("python", "print(a)\n", "page.md:10")
    assert python.says == {"setup": "a = 1\n\nb = 2", "file": "one.py"}
    assert (shell.language, shell.says) == ("bash", {})
    assert commands_of(shell.text) == [["make", "test"], ["hetero", "train"]]
    assert (indented.language, indented.text) == ("", "not fenced\n")


@pytest.mark.parametrize(
    ("command", "fact"),
    [
        ("hetero train --no-such-option 1", "--no-such-option"),
        ("hetero no-such-command", "no-such-command"),
        ("python -m bench.adam --threads many", "--threads"),
        ("python -m bench.no_such", "no_such"),
        ("python -m timeit f()", "not of this project"),
        ("python -m pytest tests/no_such", "no_such"),
        ("torchrun --nproc-per-node 2 -m hetero.cli train --no-such-option", "--no-such-option"),
        ("make no-such-target", "no-such-target"),
        ("make train ARGS='--no-such-option'", "--no-such-option"),
        ("pip install '.[no_such]'", "no_such"),
        ("rm file", "no command that is known"),
    ],
)
def test_a_wrong_command_is_found(command: str, fact: str) -> None:
    with pytest.raises((AssertionError, ImportError), match=fact):
        check(shlex.split(command))


def test_the_readme_can_be_read_at_once() -> None:
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"<!--.*?-->|```.*?```|\]\([^)]*\)", " ", text, flags=re.DOTALL)
    words = [word for word in text.split() if re.search(r"\w", word)]
    assert len(words) <= 700
