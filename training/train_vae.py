"""Train the VAE of the "shapes" checkpoint on crops of procedural scenes, resuming where it stopped.

    python -m training.train_vae --work DIR --steps 6000

Convolutions learn by Muon, the rest by Adam (with Adam alone it takes several times as long).

Stills teach sharp edges cheaply; later three steps in four take short clips, which teach the
temporal layers. A little noise on the latent stands in for the KL term: with a unit-variance
posterior the small network never leaves the plateau of the mean colour. The clamp of
``AutoencoderKLWan.decode`` has no gradient where it saturates, so the loss is taken on the
decoder's own output.
"""

import argparse
import random
import time
import types
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from training.muon import Muon
from training.scenes import draw, random_placement, random_scene

CROP = 32
STILLS_ONLY = 400
DECODER_SEEDS = 1_000_000
LATENT_NOISE = 0.05
DECODER_NOISE = 0.1
LATENT_WEIGHT = 1e-4
EDGE_WEIGHT = 0.05


def new_vae() -> AutoencoderKLWan:
    """The untrained network: Wan 2.1's layers at a tenth of their width."""
    return AutoencoderKLWan(base_dim=24, dim_mult=[1, 1, 2, 2], num_res_blocks=1)


def _conv_of_first_frame(self: WanCausalConv3d, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
    """The causal convolution; of a lone first frame only the kernel's last slice sees anything but zeros."""
    if cache_x is None and x.shape[2] == 1 and self.kernel_size == (3, 3, 3):
        return F.conv2d(x[:, :, 0], self.weight[:, :, 2], self.bias, padding=1)[:, :, None]
    output: Tensor = WanCausalConv3d.forward(self, x, cache_x)
    return output


def speed_up_stills(vae: AutoencoderKLWan) -> None:
    """Let this instance compute stills with 2D convolutions, which halves a step and changes no result."""
    for module in vae.modules():
        if isinstance(module, WanCausalConv3d):
            module.forward = types.MethodType(_conv_of_first_frame, module)


def random_batch(rng: random.Random, step: int) -> Tensor:
    """The batch of one step: stills, or three steps in four clips of 5 or 9 frames; some crops are larger."""
    if step < STILLS_ONLY or step % 4 == 0:
        return random_crops(rng, 4, 1, 64) if step % 16 == 4 else random_crops(rng, 16, 1, CROP)
    if step % 16 == 15:
        return random_crops(rng, 1, 9, 64)
    return random_crops(rng, 6, 5, CROP) if step % 4 == 2 else random_crops(rng, 4, 9, CROP)


def random_crops(rng: random.Random, count: int, frames: int, crop: int) -> Tensor:
    """Crops ``[count, 3, frames, crop, crop]`` in -1..1, most of them on a shape's outline."""
    crops: list[Tensor] = []
    while len(crops) < count:
        side_h, side_w = (rng.choice((64, 96, 128, 160, 192)) for _ in range(2))
        scene = random_scene(rng, moving=frames > 1)
        place = random_placement(rng, scene, side_h, side_w)
        clip = draw(scene, place, height=side_h, width=side_w, frames=17 if frames > 1 else 1)
        start = rng.randrange(17 - frames + 1) if frames > 1 else 0
        for _ in range(2):
            top, left = _crop_corner(rng, clip[start], place.x, place.y, crop)
            piece = clip[start : start + frames, top : top + crop, left : left + crop]
            crops.append(torch.from_numpy(np.ascontiguousarray(piece)))
    return torch.stack(crops[:count]).permute(0, 4, 1, 2, 3) * 2 - 1


def _crop_corner(rng: random.Random, frame: NDArray[np.float32], x: float, y: float, crop: int) -> tuple[int, int]:
    height, width = frame.shape[:2]
    if rng.random() < 0.3:
        return rng.randrange(height - crop + 1), rng.randrange(width - crop + 1)
    top = int(y * height + rng.uniform(-0.3, 0.3) * min(height, width) - crop / 2)
    left = int(x * width + rng.uniform(-0.3, 0.3) * min(height, width) - crop / 2)
    return min(max(top, 0), height - crop), min(max(left, 0), width - crop)


def decode_unclamped(vae: AutoencoderKLWan, latent: Tensor) -> Tensor:
    """Pixels ``[B, 3, T, H, W]`` of a latent, frame by frame as ``decode`` does, without its clamp."""
    vae.clear_cache()
    hidden = vae.post_quant_conv(latent)
    frames = []
    for i in range(hidden.shape[2]):
        vae._conv_idx = [0]
        frames.append(
            vae.decoder(hidden[:, :, i : i + 1], feat_cache=vae._feat_map, feat_idx=vae._conv_idx, first_chunk=i == 0)
        )
    vae.clear_cache()
    return torch.cat(frames, 2)


def loss_of(vae: AutoencoderKLWan, pixels: Tensor, *, decoder_only: bool) -> tuple[Tensor, float]:
    """Training loss and the plain mean squared error of one batch.

    A decoder alone gets more noise, as sampled latents are less exact than encoded ones, and an
    absolute error beside the squared one, which makes edges crisper.
    """
    with torch.set_grad_enabled(not decoder_only):
        latent = vae.encode(pixels).latent_dist.mode()
    noise = DECODER_NOISE if decoder_only else LATENT_NOISE
    noisy = latent + noise * latent.detach().std() * torch.randn_like(latent)
    error = decode_unclamped(vae, noisy) - pixels
    loss = error.square().mean() + LATENT_WEIGHT * latent.square().mean()
    if decoder_only:
        loss = loss + EDGE_WEIGHT * error.abs().mean()
    return loss, error.detach().square().mean().item()


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Short warm-up, flat, then linear to a twentieth over the last 40 percent."""
    warm = min(1.0, (step + 1) / 100)
    decay = min(1.0, max(0.05, (steps - step) / (0.4 * steps)))
    return peak * warm * decay


def split_parameters(vae: AutoencoderKLWan, *, decoder_only: bool) -> tuple[list[Parameter], list[Parameter]]:
    """The trained convolution kernels wide enough for Muon, and all other trained parameters."""
    modules = [vae.decoder, vae.post_quant_conv] if decoder_only else [vae]
    trained = [p for module in modules for p in module.parameters()]
    kernels = [p for p in trained if p.ndim >= 4 and min(p.flatten(1).shape) >= 4]
    chosen = {id(p) for p in kernels}
    return kernels, [p for p in trained if id(p) not in chosen]


class Trainer:
    """Network, optimizers and step count, saved to and resumed from one file."""

    def __init__(self, work: Path, *, peak: float, decoder_only: bool) -> None:
        torch.manual_seed(0)
        self.vae = new_vae()
        speed_up_stills(self.vae)
        self.peak, self.decoder_only, self.step = peak, decoder_only, 0
        kernels, others = split_parameters(self.vae, decoder_only=decoder_only)
        self.trained = [*kernels, *others]
        self.optimizers = [Muon(kernels, lr=peak), torch.optim.Adam(others, lr=peak, betas=(0.9, 0.95))]
        self.file = work / ("vae_decoder.pt" if decoder_only else "vae.pt")
        if self.file.exists():
            self._resume(self.file)
        elif decoder_only:
            self.vae.load_state_dict(torch.load(work / "vae.pt", weights_only=True)["model"])

    def _resume(self, file: Path) -> None:
        state = torch.load(file, weights_only=True)
        self.vae.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]

    def save(self) -> None:
        """Write the state; a kill in the middle leaves the previous one."""
        state = {
            "model": self.vae.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
        }
        torch.save(state, self.file.with_suffix(".new"))
        self.file.with_suffix(".new").replace(self.file)

    def update(self, pixels: Tensor, steps: int) -> float:
        """One step on a batch; returns the mean squared error."""
        loss, error = loss_of(self.vae, pixels, decoder_only=self.decoder_only)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(self.step, steps, self.peak)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        return error


def train(trainer: Trainer, steps: int) -> None:
    """Train to ``steps``, saving every 50."""
    began = time.time()
    errors: dict[str, list[float]] = {"still": [], "clip": []}
    while trainer.step < steps:
        step = trainer.step
        other = DECODER_SEEDS if trainer.decoder_only else 0
        pixels = random_batch(random.Random(step + other), step + other)
        error = trainer.update(pixels, steps)
        errors["still" if pixels.shape[2] == 1 else "clip"].append(error)
        if trainer.step % 50 == 0:
            means = " ".join(f"{kind} {np.mean(values[-25:]):.5f}" for kind, values in errors.items() if values)
            print(f"step {trainer.step} mse {means} {time.time() - began:.0f} s", flush=True)
        if trainer.step % 50 == 0:
            trainer.save()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the training state")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--decoder-only", action="store_true", help="keep the latents, sharpen the decoder")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    train(Trainer(args.work, peak=args.learning_rate, decoder_only=args.decoder_only), args.steps)


if __name__ == "__main__":
    main()
