"""What the page says that cards hold, against the room check, and the sizes of files against the published ones."""

import re

import pytest

from lab import room

PUBLISHED = {"minimax_h3_fl2va_pruned_int8_convrot": 20.97}
"""Sizes in GB that the official templates tell, of files that hold the transformer alone."""


@pytest.mark.parametrize("name", room.FILES)
def test_the_page_says_what_the_room_check_decides(name):
    found = room.held(room.FILES[name])
    assert room.page({name: found}).splitlines()[-1] in room.PAGE.read_text(encoding="utf-8")
    if name in PUBLISHED:
        assert found.nbytes / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


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
