"""Several runs of `hetero`, one after another, on the ranks of one torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch.distributed as dist

from hetero.cli.main import main

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for arguments in json.loads(sys.argv[1]):
        assert main(arguments) == 0, arguments
    dist.destroy_process_group()
