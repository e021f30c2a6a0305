"""The commands of `hetero`, one module each: add_command() says what it takes and what runs it.

A new command is a new module here, which hetero/cli/main.py finds; doctor.py is a short example.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
