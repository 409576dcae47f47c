"""``python -m lab bench prompt`` with a real ComfyUI."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from scripts import comfy_paths


@pytest.mark.long
@pytest.mark.newest
@pytest.mark.parametrize(
    ("model", "ways", "asked"),
    [
        ("shapes", ("Parallel Sampler", "Parallel Loader"), ("EncodeText", "Decode")),
        ("file", ("ComfyUI alone", "Parallel Model"), ()),
    ],
)
def test_the_time_of_each_way_is_told(comfyui_path: Path, model: str, ways: tuple[str, str], asked: tuple[str]) -> None:
    options = [option for way in ways for option in ("--way", way)]
    command = [sys.executable, "-m", "lab", "bench", "prompt", "--model", model, "--rounds", "1", "--no-cold", "--json"]
    sizes = ["--heads", "1", "--layers", "2", "--side", "64", "--comfyui", str(comfyui_path)]
    done = subprocess.run([*command, *options, *sizes], cwd=comfy_paths.ROOT, capture_output=True, timeout=300)
    (found,) = msgspec.json.decode(done.stdout)
    assert [way["name"] for way in found["ways"]] == list(ways), done.stderr
    text = found["ways"][0]["prompts"]["other text"]
    assert set(asked) <= text["requests"].keys()
    forwards = found["ways"][1]["prompts"]["other seed"]["requests"]["Forward"]
    assert forwards["count"] == 4
    assert 0 < forwards["seconds"]["running"] < found["ways"][1]["prompts"]["other seed"]["nodes"]["KSampler"]
