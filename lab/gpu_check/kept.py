"""A check's findings so far, kept in a file. If its time runs out, the next call goes on with the rest."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE = "GPU_CHECK_KEPT"
"""The environment variable that names the file. Without it nothing is kept."""


class Kept:
    """Findings by name, in the order of their discovery. JSON can hold them."""

    def __init__(self) -> None:
        self._file = Path(os.environ[FILE]) if FILE in os.environ else None
        self.found: dict[str, Any] = {}
        if self._file and self._file.exists():
            self.found = json.loads(self._file.read_text(encoding="utf-8"))

    def find(self, name: str, work: Callable[[], Any]) -> Any:
        """Return the finding of this name. Make it if it is missing."""
        if name not in self.found:
            self.found[name] = work()
            self._save()
        return self.found[name]

    def _save(self) -> None:
        if self._file:
            written = self._file.with_suffix(".new")
            written.write_text(json.dumps(self.found), encoding="utf-8")
            written.replace(self._file)  # a reader never sees half of it
