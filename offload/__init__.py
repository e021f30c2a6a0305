"""Where bytes live and how they move: tiers, arenas, transfers, the NVMe chunk store."""
