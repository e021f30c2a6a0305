"""Code of other projects' documents, run as it stands but for its imports."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DOCUMENTS = Path(__file__).parent / "documents"


def run_document(
    name: str,
    imports: Mapping[str, str],
    given: Mapping[str, Any] | None = None,
    left_out: Sequence[str] = (),
) -> dict[str, Any]:
    """Runs a document's code; returns its names.

    Args:
        name: of a file in `documents`.
        imports: by each import line of another project, the line in its place.
        given: names that the document takes for granted.
        left_out: what stands for each line `...` of the document, in their order.
    """
    text = (DOCUMENTS / name).read_text()
    for line, new in imports.items():
        assert text.count(f"{line}\n") == 1, f"{line!r} is not once in {name}"
        text = text.replace(f"{line}\n", f"{new}\n")
    lines: list[str] = []
    fillings = iter(left_out)
    for line in text.splitlines():
        if line.strip() == "..." and left_out:
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(textwrap.indent(textwrap.dedent(next(fillings)).strip("\n"), indent))
        else:
            lines.append(line)
    assert next(fillings, None) is None, "more is given than the document leaves out"
    names: dict[str, Any] = {"__name__": name.split(".")[0], **(given or {})}
    exec(compile("\n".join(lines), name, "exec"), names)
    return names
