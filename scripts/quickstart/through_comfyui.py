"""Run the quickstart's workflows through a real, headless ComfyUI."""

from io import BytesIO
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from PIL import Image, ImageSequence

from scripts.comfy_api import Prompt
from scripts.comfy_server import ComfyServer
from scripts.quickstart.runner import Frames

DEADLINE = 300.0


class ThroughComfyUI:
    """Runs a ComfyUI while the ``with`` block runs."""

    def __init__(self, comfyui: Path) -> None:
        self._server = ComfyServer(comfyui, cpu=not torch.cuda.is_available())

    def run(self, prompt: Prompt) -> tuple[float, Frames]:
        """See ``Runner.run``. ComfyUI measures the seconds, from the first node to the last."""
        client = self._server.client
        result = client.run(prompt, deadline=DEADLINE)
        with Image.open(BytesIO(client.fetch(result.files[0]))) as image:
            frames = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]
        return result.seconds, np.stack(frames)

    def __enter__(self) -> "ThroughComfyUI":
        self._server.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
            print(f"ComfyUI's log ends with:\n{self._server.log_text()[-3000:]}")
        self._server.__exit__(kind, error, trace)
