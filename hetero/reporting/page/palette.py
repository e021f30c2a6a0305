"""Colours and words of all pictures of a run, the same in each of them.

The colours are Okabe and Ito's, which people who see fewer colours can tell apart.
"""

from __future__ import annotations

from hetero.reporting.run_record import MemoryKind
from offload.memory.tiers import Tier

TIER_COLOURS = {Tier.DEVICE: "#CC79A7", Tier.HOST: "#0072B2", Tier.DISK: "#009E73"}
TIER_WORDS = {Tier.DEVICE: "device", Tier.HOST: "RAM", Tier.DISK: "NVMe"}
TIER_PLACES = {Tier.DEVICE: "on the device", Tier.HOST: "in RAM", Tier.DISK: "on NVMe"}
KIND_COLOURS = {
    MemoryKind.PARAM: "#0072B2",
    MemoryKind.GRAD: "#D55E00",
    MemoryKind.OPTIM_STATE: "#E69F00",
    MemoryKind.UPDATE: "#F0E442",
    MemoryKind.COPIES: "#56B4E9",
    MemoryKind.ACTIVATION: "#CC79A7",
    MemoryKind.SPARE: "#DDCC99",
    MemoryKind.OTHER: "#BBBBBB",
}
PART_COLOURS = {"forward": "#56B4E9", "backward": "#0072B2", "optimizer": "#E69F00"}
LINK_COLOURS = {
    "disk_read": "#009E73",
    "disk_write": "#CC79A7",
    "h2d": "#56B4E9",
    "d2h": "#0072B2",
    "sent": "#D55E00",
    "received": "#E69F00",
}
LINK_WORDS = {
    "disk_read": "NVMe read",
    "disk_write": "NVMe written",
    "h2d": "to the device",
    "d2h": "from the device",
    "sent": "sent to other ranks",
    "received": "received from other ranks",
}
LOSS_COLOUR = "#D55E00"
QUIET_COLOUR = "#555555"
INK = "#222222"
