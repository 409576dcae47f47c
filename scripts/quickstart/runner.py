"""The interface of what runs a workflow: a ComfyUI, or the backend's client."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from scripts.comfy_api import Prompt

Frames = NDArray[np.uint8]


class Runner(Protocol):
    """Runs workflows in API format."""

    def run(self, prompt: Prompt) -> tuple[float, Frames]:
        """Run a workflow. Returns its duration in seconds and its frames ``[N, H, W, 3]``."""
