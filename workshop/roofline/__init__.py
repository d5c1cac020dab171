"""Rooflines: what limits a kernel, a step, a machine."""
