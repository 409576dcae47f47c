"""Rate-limits the log lines that unauthenticated clients cause."""

import logging
import time


class SparingFilter(logging.Filter):
    """Passes a number of lines a second, and reports with the next one how many it dropped.

    Args:
        lines: most lines a second.
    """

    def __init__(self, lines: int = 20) -> None:
        super().__init__()
        self._lines, self._second, self._passed, self._left_out = lines, 0, 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line passes."""
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._passed = second, 0
        if self._passed >= self._lines:
            self._left_out += 1
            return False
        self._passed += 1
        if self._left_out:
            record.msg, record.args = f"{record.getMessage()} ({self._left_out} lines were left out before)", None
            self._left_out = 0
        return True
