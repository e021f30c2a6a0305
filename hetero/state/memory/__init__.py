"""The places of a chunk group's state: homes in memory, slots, extents of the scratch file."""
