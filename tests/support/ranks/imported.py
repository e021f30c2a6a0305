"""All that ranks import, for the servers that fork them: it takes seconds of each process.

A server has one thread while it imports this, and none of these starts another one.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

import hetero
import offload

# What needs other packages, is a program, or (matplotlib) has something to do at the end of each.
_LEFT_OUT = ("compat", "integrations", "cli", "reporting", "benchmarks")
import_module("torch._dynamo")  # torch's optimizers import it when the first one is made
# `import hetero` imports a module when one of its names is first used.
for package in (offload, hetero):
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if found.name.split(".")[1] not in _LEFT_OUT:
            import_module(found.name)
