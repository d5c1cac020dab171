"""Runs of a version: data, arithmetic, the timed loop, memory, and the device."""
