"""Open-Sora 2.0 from one file in the authors' names: layers in ComfyUI's process against ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import folder_paths
import pytest
import torch
from any_folder_name.nodes.open_sora2.video import ParallelOpenSora2Video
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from comfy_extras.nodes_hunyuan import EmptyHunyuanLatentVideo
from helpers import open_sora2
from helpers.inside_fixtures import Loaded, ksampler, parallel_sampler, relative_error
from natives.case import seeded

CLOSE = 1e-4
SIZE = {"width": 72, "height": 80, "length": 17}
"""In pixels: a latent of 5 x 10 x 9, whose width is not a whole number of patches."""


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in ComfyUI's folder for diffusion models."""
    folder: Path = tmp_path_factory.mktemp("diffusion_models")
    folder_paths.folder_names_and_paths["diffusion_models"][0][:] = [str(folder)]
    return open_sora2.write(folder)


@pytest.fixture
def load(file: Path, load_remote: Callable[..., Loaded]) -> Callable[..., Any]:
    """``load(layout)`` returns Parallel Loader's MODEL."""

    def run(layout: str, devices: str = "0,1") -> Any:
        return load_remote(ParallelLayout.parse(layout), name=f"diffusion_models/{file.name}", devices=devices).model

    return run


def prompt(seed: int, batch: int = 1, tokens: int = 7) -> list[Any]:
    random = seeded(seed)
    return [[random(batch, tokens, 32), {"pooled_output": random(batch, 24)}]]


class VAE:
    """Encodes frames into random numbers that follow from their mean, with HunyuanVideo's shapes."""

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        frames, height, width, _ = pixels.shape
        random = seeded(int(pixels.mean() * 1000))
        return random(1, 16, (frames - 1) // 4 + 1, height // 8, width // 8)


def image(seed: int, frames: int = 1) -> torch.Tensor:
    return torch.rand(frames, 60, 50, 3, generator=torch.Generator().manual_seed(seed))


def video(batch: int = 1, **frames: Any) -> dict[str, Any]:
    """Return what the node for given frames gives to a sampler."""
    positive, negative, latent = ParallelOpenSora2Video.execute(
        prompt(1, batch), prompt(2, tokens=5), VAE(), batch_size=batch, **SIZE, **frames
    ).args
    return {"positive": positive, "negative": negative, "latent": latent}


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "text": lambda: video(batch=2),
    "first": lambda: video(start=image(1)),
    "last": lambda: video(end=image(2)),
    "both": lambda: video(batch=2, start=image(1), end=image(2)),
    "clip": lambda: video(start=image(3, frames=9)),
}
LAYOUTS = ("ulysses=2", "cfg=2", "ring=2", "tensor=2", "pipe=2 patches=1")


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_give_what_one_process_gives(kind: str, file: Path, load: Callable[..., Any]) -> None:
    given = KINDS[kind]()
    latent, options = given.pop("latent"), {**given, "cfg": 5.0}
    whole = open_sora2.without_backend(file)
    reference = ksampler(whole, latent, **options)
    for other in ({"cfg": 1.0}, {"positive": given["negative"]}):
        assert relative_error(ksampler(whole, latent, **options | other), reference) > 0.01
    places = list(KINDS).index(kind)
    for layout in (LAYOUTS[places], LAYOUTS[(places + 1) % len(LAYOUTS)]):
        model = load(layout)
        for sample in (ksampler, parallel_sampler):
            error = relative_error(sample(model, latent, **options), reference)
            assert error < CLOSE, f"{sample.__name__}, {layout}: {error:.1e}"


def test_an_image_is_made_without_given_frames(file: Path, load: Callable[..., Any]) -> None:
    latent = EmptyHunyuanLatentVideo.execute(72, 80, 1).args[0]
    options = {"positive": prompt(1), "negative": prompt(2)}
    reference = ksampler(open_sora2.without_backend(file), latent, **options)
    assert relative_error(parallel_sampler(load("ulysses=2"), latent, **options), reference) < CLOSE
