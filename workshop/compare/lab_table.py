"""Moved to workshop/tables.py and workshop/show/: for imports that still name this place."""

from workshop.show.lab_table import *  # noqa: F403
