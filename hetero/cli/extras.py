"""The extras that hetero is installed with: what each brings, and what to say where it is missing.

Their versions are in pyproject.toml. A module has the name of its package, but for PyYAML's.
"""

from __future__ import annotations

# Of several extras that bring a module, the first is the smallest.
EXTRAS = {
    "train": ("matplotlib", "pyyaml", "rich", "transformers"),
    "finetune": ("accelerate", "datasets", "peft", "pyarrow", "trl"),
    "completion": ("shtab",),
}


def install_line(extra: str) -> str:
    """The command that brings an extra, as a shell takes it."""
    return f'pip install "hetero[{extra}]"'


def missing_extra(error: ModuleNotFoundError) -> ValueError | None:
    """What to say of a module that could not be imported; None if it is no extra's."""
    missing = (error.name or "").partition(".")[0]
    missing = {"yaml": "pyyaml"}.get(missing, missing)
    for extra, modules in EXTRAS.items():
        if missing in modules:
            return ValueError(f"{missing} is missing; install it: {install_line(extra)}")
    return None
