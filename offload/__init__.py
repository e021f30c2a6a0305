"""Where bytes live and how they move: tiers, arenas, slot caches, scratch files, devices."""
