"""Profilers' outputs, each parsed into one kernel table: show, compare, advise.

`python -m workshop.profilers --help` lists the commands. A file a tool; `table.py` is what they
all return and `load.py` finds out which of them reads a given file or folder.
"""
