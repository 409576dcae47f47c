"""What the page says that cards hold, against the room check, and the sizes of files against the published ones."""

import re

import pytest

from lab import room

PUBLISHED = {
    "MiniMax_H3_FL2VA_pruned_nvfp4": 12_528_636_865, "minimax_h3_fl2va_pruned_int8_convrot": 20_970_000_000,
    "fastvideo_fasth3_8step_v2_pruned_int8_convrot": 22_130_000_000, "minimax_h3_fl2va_int8_convrot": 34_038_892_334,
    "minimax_h3_fl2va_pruned_bf16": 40_225_724_176, "minimax_h3_fl2va_bf16": 66_280_487_368,
    "krea2_turbo_fp8_scaled": 13_140_000_000, "krea2_turbo_int8_convrot": 13_492_686_496,
}  # fmt: skip
"""Bytes of published files that hold the transformer alone. Round ones are what the official templates tell."""


LONG = ("ltx-2-19b-dev-fp8", "ltx-2.3-22b-dev-fp8", "ltx-2.5-22b-distilled-transformer-comfy-int8-convrot")


def _marks(name):
    slow = name in LONG or room.FILES[name].format == "nvfp4"  # which has 1.2 GB of scales to look at
    return [pytest.mark.long] if slow else []


@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in room.FILES])
@pytest.mark.daily(1)
def test_the_page_says_what_the_room_check_decides(name):
    found = room.held(room.FILES[name])
    assert room.page({name: found}).splitlines()[-1] in room.PAGE.read_text(encoding="utf-8")
    if name in PUBLISHED:
        assert found.nbytes == pytest.approx(PUBLISHED[name], rel=0.0005)


def test_a_card_that_is_too_small_streams_or_is_refused(tmp_path):
    name = "minimax_h3_fl2va_pruned_bf16"
    room.write(tmp_path / "model.safetensors", room.FILES[name])
    decided = [
        room.decision(room.FILES[name], tmp_path / "model.safetensors", gib << 30) for gib in (80, 32, 24, 16, 4)
    ]
    assert decided[:2] == ["whole", "shared"]
    streaming = [int(count) for text in decided[2:4] for count in re.findall(r"^(\d+) of 50 blocks stream$", text)]
    assert 0 < streaming[0] < streaming[1] < 50
    assert decided[4].startswith("refused: ranks 0 and 1") or decided[4].startswith("refused: rank 0 (cuda:0) has room")
