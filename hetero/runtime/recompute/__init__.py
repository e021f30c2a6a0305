"""Blocks whose forward is computed again in backward, so that less of it has to be kept."""
