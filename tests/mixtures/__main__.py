"""Random mixtures of nodes against ComfyUI alone: ``python -m tests.mixtures --seed 7 --count 200``.

Each mixture is a prompt that follows from its seed: a model behind Parallel Loader or Parallel Model in some layout,
nodes that change it, prompts with areas, masks, ranges of steps and LoRAs by hooks, and samplers, guiders, halves and
second passes. It runs in ComfyUI's own executor, with our nodes and with ComfyUI's in their places.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from scripts import comfy_paths
from tests.support.inside import FOLDER, run_inside

START, MOST = 300.0, 300.0
"""Seconds until the first mixture begins, and for each: more than they take on a busy machine."""
TEST = "mixtures/test_mixtures.py::test_the_mixtures_of_the_command"


def main() -> int:
    """Run the mixtures, print a line for each, and return 1 if one differs or fails but for a known refusal."""
    parser = argparse.ArgumentParser(prog="python -m tests.mixtures", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first mixture (default %(default)s)")
    parser.add_argument("--count", type=int, default=50, help="of mixtures, with one seed after the other")
    parser.add_argument("--comfyui", type=Path, help="a checkout of ComfyUI (default: the newest one that is found)")
    options = parser.parse_args()
    comfyui = options.comfyui or max(comfy_paths.candidates(), key=comfy_paths.release, default=None)
    if comfyui is None or not comfy_paths.is_comfyui(comfyui):
        parser.error(f"{comfyui or 'no ComfyUI'} is not a checkout of ComfyUI: name one with --comfyui")
    wanted = {"PARALLEL_DIT_MIXTURES": f"{options.seed}:{options.count}"}
    with tempfile.TemporaryDirectory(prefix="mixtures") as folder:
        runtime = Path(folder) / "run"
        arguments = [str(FOLDER / TEST), "--tb=short", f"--basetemp={folder}/tmp"]
        return run_inside(
            comfyui.resolve(), arguments, runtime=runtime, deadline=START + MOST * options.count, variables=wanted
        )


if __name__ == "__main__":
    sys.exit(main())
