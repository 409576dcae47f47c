"""The one door to ``machines``, for what lies below it.

Nothing of ``machines`` is imported until a name of another machine, or an option that asks for one, opens the door.
"""

import importlib
from typing import Any


def machines(part: str) -> Any:
    """Import a module of ``machines``, by its name there, such as ``links.backends``."""
    return importlib.import_module(f"{__package__}.machines.{part}")
