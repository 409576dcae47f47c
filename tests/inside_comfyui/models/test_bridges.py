"""What a family's bridge rejects, with an error that names it, before anything is sent."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from any_folder_name.nodes.families.registry import bridge_class
from any_folder_name.parallel_backend.checkpoint.opening import open_checkpoint
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.families.registry import FAMILIES
from any_folder_name.parallel_backend.vaes import VAES
from natives import CASES

TEXT = torch.zeros(1, 11, 24)
LATENTS = {"hunyuan_video": (1, 16, 3, 6, 10), "ltx": (1, 128, 3, 5, 7), "mochi": (1, 12, 3, 6, 10)}


@pytest.fixture
def bridge(tmp_path: Path) -> Callable[..., Any]:
    """``bridge(name, **changed)`` returns the bridge of a case with a changed config."""

    def create(name: str, **changed: Any) -> Any:
        case = CASES[name]
        case.describe(tmp_path, {**case.config, **changed})
        return bridge_class(case.transformer)(open_checkpoint(tmp_path))

    return create


@pytest.mark.parametrize(
    ("name", "call_args", "message"),
    [
        (
            "hunyuan_video t2v",
            {"y": torch.zeros(1, 20), "guiding_frame_index": torch.zeros(1)},
            "cannot continue a first frame",
        ),
        ("hunyuan_video i2v replace", {"y": torch.zeros(1, 20)}, "has none: connect HunyuanImageToVideo"),
        ("hunyuan_video i2v replace", {"y": torch.zeros(1, 20), "guiding_frame_index": torch.ones(1)}, "names frame 1"),
        ("hunyuan_video t2v", {}, "no pooled output"),
        (
            "ltx keyframes",
            {"frame_rate": 25, "keyframe_idxs": torch.zeros(1, 3, 35), "denoise_mask": -torch.ones(1, 128, 3, 5, 7)},
            "a mask of its own",
        ),
        ("ltx t2v", {"frame_rate": 0.0}, "frame_rate is 0: set that of the video"),
        ("ltx keyframes", {"guide_attention_entries": [{"strength": 0.5}]}, "a guide of strength 0.5"),
        (
            "ltx keyframes",
            {"guide_attention_entries": [{"strength": 1.0, "pixel_mask": torch.ones(1)}]},
            "disconnect its attention_mask",
        ),
        ("mochi t2v", {"num_tokens": 256}, "no attention_mask"),
        ("mochi t2v", {"num_tokens": 1, "attention_mask": torch.eye(11)[3:4].long()}, "mask with gaps"),
        ("mochi t2v", {"num_tokens": 1, "attention_mask": torch.ones(1, 5).long()}, "use ConditioningCombine"),
    ],
)
def test_unsupported_calls_are_refused(
    name: str, call_args: dict[str, Any], message: str, bridge: Callable[..., Any]
) -> None:
    x = torch.zeros(LATENTS[name.partition(" ")[0]])
    with pytest.raises(InvalidRequest, match=message):
        bridge(name).inputs(x, torch.ones(1), {"context": TEXT, **call_args})


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("sd3 medium", {"num_layers": 3}, "3 layers of 2 heads"),
        ("sd3 medium", {"in_channels": 4}, "this version of ComfyUI has no model for SD3Transformer2DModel"),
        ("ltx t2v", {"num_attention_heads": 16}, "16 heads"),
        ("pixart alpha", {"caption_channels": None}, "caption_channels"),
    ],
)
def test_configs_without_a_model_in_comfyui_are_refused(
    name: str, changed: dict[str, Any], message: str, bridge: Callable[..., Any]
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        bridge(name, **changed).check()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ranks_run_every_vae_of_a_family(family: str) -> None:
    assert set(bridge_class(family).vaes) <= VAES.keys()
