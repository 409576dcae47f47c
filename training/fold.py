"""Give the trained VAE's latents Wan's own mean and standard deviation, and write it in diffusers layout.

    python -m training.fold --work DIR

ComfyUI normalises Wan latents with constants of its own, so ours must come out with these
statistics. An affine per channel does it, and it vanishes into the 1 x 1 convolutions on both
sides of the latent: reconstructions do not change.
"""

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from training.latents import random_clip, shard_bucket
from training.train_vae import LATENT_NOISE, new_vae, speed_up_stills

SCENES = 96


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Mean and standard deviation of every latent channel, ``[16]`` each."""

    mean: Tensor
    std: Tensor


@torch.no_grad()
def measure(vae: AutoencoderKLWan, scenes: int = SCENES) -> Statistics:
    """Statistics over random scenes of all training sizes, every scene with equal weight."""
    rng = random.Random("statistics")
    first, second = torch.zeros(16, dtype=torch.float64), torch.zeros(16, dtype=torch.float64)
    for index in range(scenes):
        _, pixels = random_clip(rng, shard_bucket(index))
        latent = vae.encode(pixels[None]).latent_dist.mode()[0].flatten(1).double()
        first += latent.mean(1) / scenes
        second += latent.square().mean(1) / scenes
    return Statistics(mean=first.float(), std=(second - first**2).sqrt().float())


@torch.no_grad()
def fold(vae: AutoencoderKLWan, measured: Statistics) -> None:
    """Change ``quant_conv`` and ``post_quant_conv`` so that the latents have Wan's statistics.

    The variance half of the posterior, which nothing trained, becomes the noise the decoder was
    trained with.
    """
    target_mean, target_std = (torch.tensor(vae.config[f"latents_{name}"]) for name in ("mean", "std"))
    gain = target_std / measured.std
    shift = target_mean - gain * measured.mean
    into, out_of = vae.quant_conv, vae.post_quant_conv
    channels = len(gain)
    into.weight[:channels] *= gain.view(-1, 1, 1, 1, 1)
    into.bias[:channels] = into.bias[:channels] * gain + shift
    into.weight[channels:] = 0
    into.bias[channels:] = 2 * (LATENT_NOISE * target_std).log()
    out_of.weight /= gain.view(1, -1, 1, 1, 1)
    out_of.bias -= out_of.weight[:, :, 0, 0, 0] @ shift


def trained_vae(work: Path) -> AutoencoderKLWan:
    """The VAE of the last training state; its decoder from ``--decoder-only`` training where there was any."""
    vae = new_vae().eval()
    vae.load_state_dict(torch.load(work / "vae.pt", weights_only=True)["model"])
    decoder = work / "vae_decoder.pt"
    if decoder.exists():
        vae.load_state_dict(torch.load(decoder, weights_only=True)["model"])
    return vae


def folded_vae(work: Path) -> AutoencoderKLWan:
    """The trained VAE with Wan's statistics; these are measured once and kept, as latents depend on them."""
    vae = trained_vae(work)
    file = work / "statistics.pt"
    if not file.exists():
        speed_up_stills(vae)
        measured = measure(vae)
        torch.save({"mean": measured.mean, "std": measured.std}, file)
        vae = trained_vae(work)
    fold(vae, Statistics(**torch.load(file, weights_only=True)))
    return vae


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder with vae.pt; vae/ is written beside it")
    folded_vae(parser.parse_args().work).save_pretrained(parser.parse_args().work / "vae")


if __name__ == "__main__":
    main()
