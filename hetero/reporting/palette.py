"""Colours of all pictures: of runs, of plans, of benchmarks and of the documents.

A hue means a kind of state, a violet or yellow a phase of a step, a grey a tier or the link to it.
Colours that one picture shows together can be told apart by people who see fewer colours:
tests/hetero/reporting/test_palette.py computes what they see. No other file names a colour.
"""

from __future__ import annotations

from hetero.reporting.run_record import MemoryKind
from offload.memory.tiers import Tier

INK, QUIET, FAINT, GROUND = "#222222", "#5A5A5A", "#E0E0E0", "#FFFFFF"

KIND_COLOURS = {
    MemoryKind.PARAM: "#1153C5",
    MemoryKind.GRAD: "#E86F05",
    MemoryKind.OPTIM_STATE: "#169D59",
    MemoryKind.UPDATE: "#BFEEE4",
    MemoryKind.COPIES: "#56C9FB",
    MemoryKind.ACTIVATION: "#DF6ABC",
    MemoryKind.SPARE: "#E3E2AB",
    MemoryKind.OTHER: "#737373",
}
PHASE_COLOURS = {"forward": "#BB8FEF", "backward": "#553B7A", "optimizer": "#F9D20E"}
REST_COLOUR = FAINT

TIER_COLOURS = {Tier.DEVICE: "#C4C4C4", Tier.HOST: "#8C8C8C", Tier.DISK: "#4A4A4A"}

# Colour and line of a link: the grey is that of the far tier, and dashes go away from compute.
LINK_LINES = {
    "disk_read": (TIER_COLOURS[Tier.DISK], "-"),
    "disk_write": (TIER_COLOURS[Tier.DISK], "--"),
    "h2d": (TIER_COLOURS[Tier.HOST], "-"),
    "d2h": (TIER_COLOURS[Tier.HOST], "--"),
    "sent": (TIER_COLOURS[Tier.HOST], "--"),
    "received": (TIER_COLOURS[Tier.HOST], "-"),
}
# Lanes of a timeline; the training loop's has the phases.
LANE_COLOURS = {
    "compute": REST_COLOUR,
    "gather": INK,
    "activation": INK,
    "update": PHASE_COLOURS["optimizer"],
    "nvme_read": TIER_COLOURS[Tier.DISK],
    "nvme_write": QUIET,
    "h2d": TIER_COLOURS[Tier.HOST],
    "d2h": TIER_COLOURS[Tier.HOST],
}


def ink_on(colour: str) -> str:
    """The colour of words on a ground: dark or white, whichever has more contrast."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    light = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return INK if light > 0.213 else GROUND
