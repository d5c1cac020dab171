"""The exercises' frame: `python -m workshop.exercises list | check | hint | reset`.

An exercise is a folder `exercises/NAME/` of a version or a lab, with a sheet (README.md), what the
participant copies and fills (starter.py, answers.toml), and a check (check.py). `frame.py` is what
a check is written against; `runner.py` runs it in a separate process.
"""
