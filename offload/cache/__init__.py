"""Slots that hold copies of chunks whose home is elsewhere, and which copy is given up."""
