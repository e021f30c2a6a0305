"""Durable state: commits of steps, their files, and the way back to the last one."""
