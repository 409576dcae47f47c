"""What makes pictures of a workflow: a ComfyUI, or the backend's own client."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from scripts.comfy_api import Prompt

Frames = NDArray[np.uint8]


class Runner(Protocol):
    """What makes pictures of a workflow in API format."""

    def run(self, prompt: Prompt) -> tuple[float, Frames]:
        """Seconds, and the frames ``[N, H, W, 3]``."""
