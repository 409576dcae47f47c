"""What the names of a file's components begin with, as ComfyUI's loaders take it. No torch."""

from collections import Counter
from collections.abc import Collection, Iterable

_TRANSFORMER = ("model.diffusion_model.", "model.model.", "net.", "model.")
"""What a transformer's names may begin with. ComfyUI's ``unet_prefix_from_state_dict`` has the same ones."""

_FEWEST = 6
"""How many names ComfyUI wants to see before it takes their beginning away."""

_VAE = ("vae.", "first_stage_model.")
"""What a VAE's names may begin with in files that hold a whole model."""

_VAE_LAYERS = ("decoder.", "decoder_ema.")
"""Layers of a VAE that no transformer has."""

Prefixes = dict[str, str]
"""The beginning of each component's names, by diffusers' component name."""


def possible_prefixes(names: Collection[str]) -> tuple[Prefixes, ...]:
    """Return what a file may hold according to its names, the likeliest first."""
    start = _transformer_prefix(names)
    vae = next((vae for vae in _VAE if any(name.startswith(vae) for name in names)), None)
    if vae is not None and all(name.startswith(vae) for name in names):
        return ({"vae": vae},)
    inside = {} if vae is None else {"vae": vae}
    if not start and any(name.startswith(_VAE_LAYERS) for name in names):
        return {"vae": ""}, {"transformer": ""} | inside
    return ({"transformer": start} | inside,)


def _transformer_prefix(names: Iterable[str]) -> str:
    """Return what a transformer's names begin with; "" if they are plain."""
    counts = Counter(next((start for start in _TRANSFORMER if name.startswith(start)), "") for name in names)
    *whole, last = _TRANSFORMER
    most = max(whole, key=lambda start: counts[start])
    return next((start for start in (most, last) if counts[start] >= _FEWEST), "")
