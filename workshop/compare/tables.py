"""Moved to workshop/tables.py and workshop/show/: for imports that still name this place."""

from workshop.show.comparisons import *  # noqa: F403
from workshop.tables import *  # noqa: F403
