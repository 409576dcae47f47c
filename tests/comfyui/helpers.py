"""Helpers of the ComfyUI tests: pixels of results."""

from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image, ImageSequence

from scripts.comfy_api import ComfyClient, Result


def pixels(client: ComfyClient, result: Result) -> "np.ndarray[Any, np.dtype[np.int16]]":
    """Return the frames of all of a result's files.

    They are ``[N, H, W, 3]`` int16 in 0..255, so that they can be subtracted.
    """
    frames = []
    for file in result.files:
        with Image.open(BytesIO(client.fetch(file))) as image:
            frames += [np.asarray(frame.convert("RGB"), dtype=np.int16) for frame in ImageSequence.Iterator(image)]
    return np.stack(frames)


def difference(a: "np.ndarray[Any, Any]", b: "np.ndarray[Any, Any]") -> int:
    """Return the largest difference of two arrays of pixels, in steps of 1/255."""
    assert a.shape == b.shape, f"{a.shape} against {b.shape}"
    return int(np.abs(a - b).max())
