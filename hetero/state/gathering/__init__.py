"""Chunks that are divided over ranks become whole where they are used."""
