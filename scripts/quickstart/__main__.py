"""The quickstart: make an image and a video with two ranks and with one, through a real ComfyUI if there is one."""

import argparse
import os
import signal
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from scripts import comfy_paths, install, workflows
from scripts.comfy_api import Prompt
from scripts.comfy_paths import ROOT
from scripts.quickstart.runner import Frames, Runner

OUTPUT = ROOT / "output"
WORKFLOWS = {
    "image.png": "Included model, text to image (native nodes)",
    "video.webp": "Included model, text to video (native nodes)",
}
FRAME_MS = 125


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One run of a workflow after everything is loaded.

    Attributes:
        ranks: the number of ranks.
        seconds: how long the prompt ran.
        frames: what it made, ``[N, H, W, 3]``.
    """

    ranks: int
    seconds: float
    frames: Frames


def rank_counts() -> list[int]:
    """Two ranks, then one. On a machine with a single GPU only one."""
    return [1] if torch.cuda.device_count() == 1 else [2, 1]


def on_ranks(prompt: Prompt, ranks: int, **values: Any) -> Prompt:
    """A workflow on the first ``ranks`` devices, with ``values`` in place of the inputs of these names in all nodes."""
    values["devices"] = ",".join(str(i) for i in range(ranks))
    return {
        key: {**node, "inputs": {name: values.get(name, value) for name, value in node["inputs"].items()}}
        for key, node in prompt.items()
    }


def measure(runner: Runner, name: str, ranks: int) -> Timing:
    """Run a workflow for one step, which loads everything, and then as it is."""
    prompt = workflows.api(name)
    runner.run(on_ranks(prompt, ranks, seed=1, steps=1))
    seconds, frames = runner.run(on_ranks(prompt, ranks, seed=2))
    return Timing(ranks=ranks, seconds=seconds, frames=frames)


def save(frames: Frames, path: Path) -> None:
    """Save the first frame as PNG or all frames as animated WebP, by the suffix of ``path``."""
    first, *rest = [Image.fromarray(frame) for frame in frames]
    if path.suffix == ".png":
        first.save(path)
    else:
        first.save(path, save_all=True, append_images=rest, duration=FRAME_MS, loop=0, lossless=True)


def report(path: Path, timings: list[Timing]) -> None:
    """Print where a file is, and compare the runs with different numbers of ranks."""
    print(f"\n{path}")
    for timing in timings:
        ranks = "1 rank " if timing.ranks == 1 else f"{timing.ranks} ranks"
        print(f"  {ranks}: {timing.seconds:6.2f} s per prompt")
    if len(timings) == 1:
        print("  With one GPU there is no second rank to compare with.")
        return
    a, b = (timing.frames.astype(np.int16) for timing in timings)
    print(f"  largest pixel difference between the two: {np.abs(a - b).max()} of 255")


def make_all(runner: Runner, output: Path) -> None:
    """Run both workflows with each number of ranks. Save the results of the largest number."""
    output.mkdir(parents=True, exist_ok=True)
    for filename, name in WORKFLOWS.items():
        timings = [measure(runner, name, ranks) for ranks in rank_counts()]
        save(timings[0].frames, output / filename)
        report(output / filename, timings)


def runner_for(comfyui: Path | None) -> AbstractContextManager[Runner]:
    """Run workflows through a ComfyUI, or without one through the backend's client."""
    if comfyui is not None:
        from scripts.quickstart.through_comfyui import ThroughComfyUI

        return ThroughComfyUI(comfyui)
    from scripts.quickstart.through_client import ThroughClient

    return ThroughClient()


def find_comfyui() -> Path | None:
    """The preferred ComfyUI, unless this environment lacks packages that it needs; then print which and return None."""
    for path in comfy_paths.candidates()[:1]:
        missing = install.missing(path)
        if not missing:
            print(f"ComfyUI {comfy_paths.version(path)} in {path}", flush=True)
            return path
        print(f"Skipping ComfyUI in {path}: it needs {', '.join(missing)}, which {sys.prefix} lacks.")
    return None


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--client", action="store_true", help="do not use ComfyUI, even if there is one")
    parser.add_argument(
        "--output", type=Path, default=OUTPUT, help="folder for the image and the video (default: output)"
    )
    return parser.parse_args()


def main() -> None:
    """Run the command."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that with blocks clean up
    if not torch.cuda.is_available():
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        print("No GPU found: the ranks are CPU processes with one thread each.")
    comfyui = None if arguments.client else find_comfyui()
    if comfyui is None:
        print("Without ComfyUI: running the same workflows through the backend's client.", flush=True)
    with runner_for(comfyui) as runner:
        make_all(runner, arguments.output)


if __name__ == "__main__":
    main()
