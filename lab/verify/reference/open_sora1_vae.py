"""Open-Sora 1.2's VAE against tensors of the authors' ``VideoAutoencoderPipeline``."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from parallel_backend.errors import InvalidRequest
from parallel_backend.vaes import module_class_of
from parallel_backend.vaes.open_sora1_module import SPATIAL_FACTOR

from . import recipe
from .difference import VAE, Difference, of_tensors
from .part import Part, load_weights

CLASS_NAME = "VideoAutoencoderPipeline"
_SETTINGS = (
    "filters", "channel_multipliers", "temporal_downsample", "num_res_blocks", "in_out_channels", "latent_embed_dim",
    "embed_dim",
)  # fmt: skip
"""Numbers of the temporal VAE. The authors' ``VAE_Temporal_SD`` has those of the published model."""


def compare(part: Part) -> Iterator[Difference]:
    """Compare encoding, with and without noise, and decoding."""
    module = model(part)
    for cell in part.cells("in.video"):
        yield from _encoding(part, module, cell)
    for cell in part.cells("in.latent"):
        yield from _decoding(part, module, cell)


def model(part: Part) -> Any:
    """Return the part's module.

    Raises:
        InvalidRequest: its config is of another kind, or its weights do not fit.
    """
    config = part.entry("config")
    factor, temporal = config.get("spatial factor", SPATIAL_FACTOR), config["temporal"]
    if factor != SPATIAL_FACTOR:
        raise InvalidRequest(f"{part.file}: a spatial factor of {factor} is not supported; {SPATIAL_FACTOR} is")
    numbers = {name: temporal[name] for name in _SETTINGS if name in temporal}
    if "norm groups" in config:
        numbers["norm_num_groups"] = config["norm groups"]
    module = module_class_of(CLASS_NAME)(
        **config["spatial"], **numbers, micro_frame_size=config["micro_frame_size"]
    )  # fmt: skip
    constants = {name: torch.tensor(config[name]) for name in ("scale", "shift")}
    given = part.entry("weights")
    load_weights(module, part.load(given) if isinstance(given, str) else recipe.weights(part, constants))
    return module.eval().requires_grad_(False)


def _encoding(part: Part, module: Any, cell: str) -> Iterator[Difference]:
    video = part.tensor(f"{cell}.in.video")
    wanted = part.under(cell, "mid") | {f"out.{name}": value for name, value in part.under(cell, "out").items()}
    if "moments" in wanted:
        moments = torch.cat(list(module.encode_moments(video)), dim=2)
        yield of_tensors(f"{part.name} {cell} moments", moments, wanted["moments"], VAE)
    yield of_tensors(f"{part.name} {cell} encoded", module.encode(video), part.tensor(f"{cell}.out.mean"), VAE)
    noise = part.under(cell, "in", "noise")
    if "out.drawn" in wanted:
        yield of_tensors(f"{part.name} {cell} drawn", drawn(module, video, noise), wanted["out.drawn"], VAE)


def drawn(module: Any, video: Tensor, noise: Mapping[str, Tensor]) -> Tensor:
    """Return the normalised latent with noise in both posteriors, as the authors encode given frames."""
    by_frame = rearrange(noise["spatial"], "(b t) c h w -> t b c h w", b=len(video))
    means = []
    for frame, drawn_noise in zip(video.unbind(2), by_frame, strict=True):
        posterior = module.spatial_vae.module.encode(frame).latent_dist
        means.append((posterior.mean + posterior.std * drawn_noise) * SPATIAL_FACTOR)
    latents = torch.stack(means, dim=2)
    chunks = [module.temporal_vae.encode(part) for part in latents.split(module.config.micro_frame_size, dim=2)]
    mean, log_variance = torch.cat(chunks, dim=2).chunk(2, dim=1)
    std = torch.exp(0.5 * log_variance.clamp(-30.0, 20.0))
    normalised: Tensor = (mean + std * noise["temporal"] - module.shift) / module.scale
    return normalised


def _decoding(part: Part, module: Any, cell: str) -> Iterator[Difference]:
    latent, wanted = part.tensor(f"{cell}.in.latent"), part.tensor(f"{cell}.out.pixels")
    spatial, frames = part.under(cell, "mid").get("spatial"), wanted.shape[2]
    if spatial is not None:
        yield of_tensors(f"{part.name} {cell} spatial", _spatial(module, latent, frames), spatial, VAE)
    yield of_tensors(f"{part.name} {cell} decoded", module.decode(latent, frames), wanted, VAE)


def _spatial(module: Any, latent: Tensor, frames: int) -> Tensor:
    """Return the latents that the spatial VAE decodes, before they are divided by its factor."""
    parts = []
    for chunk in (latent * module.scale + module.shift).split(module.chunk, dim=2):
        parts.append(module.temporal_vae.decode(chunk, min(module.config.micro_frame_size, frames)))
        frames -= parts[-1].shape[2]
    return torch.cat(parts, dim=2)
