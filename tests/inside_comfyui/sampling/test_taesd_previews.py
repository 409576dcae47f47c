"""Previews by ComfyUI's small decoders (``--preview-method taesd``): with random weights, the same as ComfyUI's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.cli_args
import comfy.taesd.taehv
import comfy.taesd.taesd
import comfy.utils
import folder_paths
import numpy as np
import pytest
import torch
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from helpers.inside_fixtures import ksampler, native_case, parallel_sampler
from helpers.native_vaes import randomize
from natives import CASES
from safetensors.torch import save_file

SAMPLERS = (ksampler, parallel_sampler)
FAMILIES = ("flux dev", "wan t2v")
SIDE = 8
"""Pixels of a side for each one of the latent."""


def decoder_for(latent_format: Any) -> dict[str, torch.Tensor]:
    """Return random weights of the small decoder that ComfyUI would look for."""
    channels = latent_format.latent_channels
    if "tae" in latent_format.taesd_decoder_name and latent_format.latent_dimensions == 3:
        module: Any = comfy.taesd.taehv.TAEHV(latent_channels=channels)
    else:
        module = comfy.taesd.taesd.Decoder(latent_channels=channels)
    return {name: tensor.contiguous() for name, tensor in randomize(module).state_dict().items()}


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A family whose small decoder lies where ComfyUI looks for it."""
    given: str = request.param
    latent_format = native_case(given).model.latent_format
    save_file(decoder_for(latent_format), tmp_path / f"{latent_format.taesd_decoder_name}.safetensors")
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "vae_approx", ([str(tmp_path)], {".safetensors"}))
    monkeypatch.delitem(folder_paths.filename_list_cache, "vae_approx", raising=False)
    monkeypatch.setattr(comfy.cli_args.args, "preview_method", comfy.cli_args.LatentPreviewMethod.TAESD)
    return given


def previews(monkeypatch: pytest.MonkeyPatch, sample: Callable[..., Any], model: Any, case: Any) -> list[Any]:
    """Return the pictures that ComfyUI's page would show."""
    shown: list[Any] = []

    def hook(value: int, total: int, preview: Any, node_id: Any = None) -> None:
        shown.append(np.asarray(preview[1], int))

    # Newer versions of ComfyUI drop updates that follow each other closely.
    monkeypatch.setattr(comfy.utils, "PROGRESS_THROTTLE_MIN_INTERVAL", 0.0, raising=False)
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", hook)
    options = {"positive": case.conditioning(1), "negative": case.conditioning(2), "cfg": case.cfg, "steps": 2}
    sample(model, case.samples(), **options)
    return shown


@pytest.mark.parametrize("sample", SAMPLERS)
def test_previews_are_those_of_comfyui(
    name: str, sample: Callable[..., Any], load_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    wanted = previews(monkeypatch, ksampler, native_case(name), case)
    ours = previews(monkeypatch, sample, load_case(name, ParallelLayout(ulysses=2)), case)
    height, width = case.latent[-2:]
    assert [each.shape for each in wanted] == [(SIDE * height, SIDE * width, 3)] * 2
    assert wanted[0].std() > 0.5, "a plain picture would prove nothing"
    for mine, theirs in zip(ours, wanted, strict=True):
        assert np.abs(mine - theirs).max() <= 1
