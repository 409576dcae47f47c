"""What a family's bridge refuses, by name and before anything is sent."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from any_folder_name.nodes.families.registry import BRIDGES
from any_folder_name.parallel_backend.checkpoint.checkpoint import Checkpoint
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.vaes import VAES
from natives import CASES

TEXT = torch.zeros(1, 11, 24)
LATENTS = {"hunyuan_video": (1, 16, 3, 6, 10), "ltx": (1, 128, 3, 5, 7), "mochi": (1, 12, 3, 6, 10)}


@pytest.fixture
def bridge(tmp_path: Path) -> Callable[..., Any]:
    """The bridge of a case's config, with some numbers changed."""

    def make(name: str, **changed: Any) -> Any:
        case = CASES[name]
        case.describe(tmp_path, {**case.config, **changed})
        return BRIDGES[case.transformer](Checkpoint.open(tmp_path))

    return make


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("hunyuan_video t2v", {"y": torch.zeros(1, 20), "guiding_frame_index": torch.zeros(1)}, "no model that"),
        ("hunyuan_video i2v replace", {"y": torch.zeros(1, 20)}, "has none: connect HunyuanImageToVideo"),
        ("hunyuan_video i2v replace", {"y": torch.zeros(1, 20), "guiding_frame_index": torch.ones(1)}, "names frame 1"),
        ("hunyuan_video t2v", {}, "no pooled output"),
        (
            "ltx keyframes",
            {"frame_rate": 25, "keyframe_idxs": torch.zeros(1, 3, 35), "denoise_mask": -torch.ones(1, 128, 3, 5, 7)},
            "a mask of its own",
        ),
        ("mochi t2v", {"num_tokens": 256}, "no attention_mask"),
        ("mochi t2v", {"num_tokens": 1, "attention_mask": torch.eye(11)[3:4].long()}, "leaves gaps"),
    ],
)
def test_calls_that_cannot_be_carried_over_are_refused(
    name: str, given: dict[str, Any], message: str, bridge: Callable[..., Any]
) -> None:
    x = torch.zeros(LATENTS[name.partition(" ")[0]])
    with pytest.raises(InvalidRequest, match=message):
        bridge(name).inputs(x, torch.ones(1), {"context": TEXT, **given})


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("sd3 medium", {"num_layers": 3}, "3 layers of 2 heads"),
        ("sd3 medium", {"in_channels": 4}, "this version of ComfyUI has no model for SD3Transformer2DModel"),
        ("ltx t2v", {"num_attention_heads": 16}, "16 heads"),
        ("pixart alpha", {"caption_channels": None}, "caption_channels"),
    ],
)
def test_configs_that_comfyui_has_no_model_for_are_refused(
    name: str, changed: dict[str, Any], message: str, bridge: Callable[..., Any]
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        bridge(name, **changed).check()


@pytest.mark.parametrize("family", BRIDGES)
def test_every_vae_of_a_family_is_one_that_the_ranks_run(family: str) -> None:
    assert set(BRIDGES[family].vaes) <= VAES.keys()
