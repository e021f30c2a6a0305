"""Scratch files on one or several disks, and transfers to and from them."""
