"""The writers of compressed files in ``tests/support``, a package that ComfyUI's own ``tests`` hides."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MODULE = runpy.run_path(str(Path(__file__).parents[2] / "support" / "compressed.py"))

GGUF_TYPES: tuple[str, ...] = _MODULE["GGUF_TYPES"]
FORMATS: dict[str, Any] = _MODULE["FORMATS"]
described: Callable[..., dict[str, Any]] = _MODULE["described"]
write_described: Callable[..., Any] = _MODULE["write_described"]
write_gguf: Callable[..., Any] = _MODULE["write_gguf"]
write_scaled: Callable[..., Any] = _MODULE["write_scaled"]
write_mixed: Callable[..., Any] = _MODULE["write_mixed"]
