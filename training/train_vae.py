"""Train one half of the VAE of the "shapes" checkpoint on crops of scenes. A stopped run is resumed.

    python -m training.train_vae --work DIR --half decoder
    python -m training.train_vae --work DIR --half encoder

Both halves train against a fixed latent space, ``training.codec``, so they train independently, by plain regression.
Muon trains the convolutions, Adam the rest; Adam alone takes several times as long. Stills teach sharp edges at low
cost; later steps are mostly short clips, which train the temporal layers. The clamp of ``AutoencoderKLWan.decode`` has
no gradient where it saturates, so the loss uses the decoder's unclamped output.
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
from torch import Tensor, nn
from torch.nn import Parameter

from training.codec import shapes_codec
from training.muon import Muon
from training.scenes import draw, random_placement, random_scene

CROP = 32
"""Side of most crops, in pixels."""
STILLS_ONLY_STEPS = 400
"""The first steps train on stills only."""
LATENT_NOISE = 0.05
"""Standard deviation of the decoder's input noise, in normalised units."""


def new_vae() -> AutoencoderKLWan:
    """Create the untrained network: Wan 2.1's VAE with fewer channels and layers.

    Its channels are cut to between a quarter and an eighth. Each stage has one fewer residual block.
    """
    return AutoencoderKLWan(base_dim=24, dim_mult=[1, 1, 2, 2], num_res_blocks=1)


def _conv_of_first_frame(self: WanCausalConv3d, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
    """Compute the causal convolution. For a single first frame, only the kernel's last slice meets non-zero input."""
    if cache_x is None and x.shape[2] == 1 and self.kernel_size == (3, 3, 3):
        return F.conv2d(x[:, :, 0], self.weight[:, :, 2], self.bias, padding=1)[:, :, None]
    output: Tensor = WanCausalConv3d.forward(self, x, cache_x)
    return output


def speed_up_stills(vae: AutoencoderKLWan) -> None:
    """Make this instance compute stills with 2D convolutions, which halves a step's time and changes no result."""
    for module in vae.modules():
        if isinstance(module, WanCausalConv3d):
            module.forward = types.MethodType(_conv_of_first_frame, module)


def random_batch(rng: random.Random, step: int) -> Tensor:
    """Draw a step's batch.

    After ``STILLS_ONLY_STEPS``, three of four batches are clips of 5 or 9 frames. Crops are 32 or 64 pixels wide.
    """
    if step < STILLS_ONLY_STEPS or step % 4 == 0:
        return random_crops(rng, 4, 1, 64) if step % 16 == 4 else random_crops(rng, 16, 1, CROP)
    if step % 16 == 15:
        return random_crops(rng, 1, 9, 64)
    return random_crops(rng, 6, 5, CROP) if step % 4 == 2 else random_crops(rng, 4, 9, CROP)


def random_crops(rng: random.Random, count: int, frames: int, crop: int) -> Tensor:
    """Draw crops ``[count, 3, frames, crop, crop]`` in -1..1, most of them near a shape."""
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
    """Decode a latent to pixels ``[B, 3, T, H, W]`` frame by frame, like ``decode`` but without its clamp."""
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


def denormalise(vae: AutoencoderKLWan, normalised: Tensor) -> Tensor:
    """Convert the transformer's normalised latents to the VAE's, which have Wan's mean and standard deviation."""
    mean, std = (torch.tensor(vae.config[f"latents_{name}"]).view(1, -1, 1, 1, 1) for name in ("mean", "std"))
    return normalised * std + mean


def encoder_loss(vae: AutoencoderKLWan, pixels: Tensor) -> Tensor:
    """Return the mean squared error of the encoder's mode from the codec's latent, in normalised units."""
    std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    latent: Tensor = vae.encode(pixels).latent_dist.mode()
    return ((latent - denormalise(vae, shapes_codec().encode(pixels))) / std).square().mean()


def decoder_loss(vae: AutoencoderKLWan, pixels: Tensor) -> Tensor:
    """Return the mean squared error of the pixels decoded from the codec's latent, plus noise like a sampler leaves."""
    latent = shapes_codec().encode(pixels)
    noisy = latent + LATENT_NOISE * torch.randn_like(latent)
    return (decode_unclamped(vae, denormalise(vae, noisy)) - pixels).square().mean()


@torch.no_grad()
def set_posterior_variance(vae: AutoencoderKLWan) -> None:
    """Set the untrained posterior variance to that of the decoder's training noise."""
    conv, std = vae.quant_conv, torch.tensor(vae.config.latents_std)
    conv.weight[len(std) :] = 0
    conv.bias[len(std) :] = 2 * (LATENT_NOISE * std).log()


LOSSES = {"encoder": encoder_loss, "decoder": decoder_loss}


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Warm up over 100 steps, stay flat, then decay linearly to a twentieth over the last 40 percent."""
    warm = min(1.0, (step + 1) / 100)
    decay = min(1.0, max(0.05, (steps - step) / (0.4 * steps)))
    return peak * warm * decay


def split_parameters(modules: list[nn.Module]) -> tuple[list[Parameter], list[Parameter]]:
    """Return the convolution kernels that are wide enough for Muon, and all other parameters."""
    trained = [p for module in modules for p in module.parameters()]
    kernels = [p for p in trained if p.ndim >= 4 and min(p.flatten(1).shape) >= 4]
    kernel_ids = {id(p) for p in kernels}
    return kernels, [p for p in trained if id(p) not in kernel_ids]


def halves(vae: AutoencoderKLWan) -> dict[str, list[nn.Module]]:
    """Return the modules on either side of the latent."""
    return {"encoder": [vae.encoder, vae.quant_conv], "decoder": [vae.post_quant_conv, vae.decoder]}


def load_half(vae: AutoencoderKLWan, half: str, states: list[dict[str, Tensor]]) -> None:
    """Load saved weights into one half."""
    for module, state in zip(halves(vae)[half], states, strict=True):
        module.load_state_dict(state)


def trained_vae(work: Path) -> AutoencoderKLWan:
    """Load the VAE with both halves as last saved."""
    vae = new_vae().eval()
    for half in LOSSES:
        load_half(vae, half, torch.load(work / f"{half}.pt", weights_only=True)["model"])
    return vae


class Trainer:
    """One half of the VAE, its optimizers and step count, saved to and resumed from one file."""

    def __init__(self, work: Path, half: str, *, peak: float) -> None:
        torch.manual_seed(0)
        self.vae, self.half, self.peak, self.step = new_vae(), half, peak, 0
        speed_up_stills(self.vae)
        set_posterior_variance(self.vae)
        self.modules = halves(self.vae)[half]
        kernels, others = split_parameters(self.modules)
        self.trained = [*kernels, *others]
        self.optimizers = [Muon(kernels, lr=peak), torch.optim.Adam(others, lr=peak, betas=(0.9, 0.95))]
        self.file = work / f"{half}.pt"
        if self.file.exists():
            self._resume()

    def _resume(self) -> None:
        state = torch.load(self.file, weights_only=True)
        load_half(self.vae, self.half, state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]

    def save(self) -> None:
        """Save the state atomically: if the process is killed meanwhile, the previous state remains."""
        state = {
            "model": [module.state_dict() for module in self.modules],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
        }
        torch.save(state, self.file.with_suffix(".new"))
        self.file.with_suffix(".new").replace(self.file)

    def update(self, pixels: Tensor, steps: int) -> float:
        """Train one step and return the loss. The noise depends only on the step, so a resumed run repeats it."""
        torch.manual_seed(self.step)
        loss = LOSSES[self.half](self.vae, pixels)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(self.step, steps, self.peak)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        return loss.item()


def train(trainer: Trainer, steps: int) -> None:
    """Train up to step ``steps``, saving every 50 steps."""
    start = time.time()
    errors: dict[str, list[float]] = {"still": [], "clip": []}
    while trainer.step < steps:
        step = trainer.step
        pixels = random_batch(random.Random(step), step)
        error = trainer.update(pixels, steps)
        errors["still" if pixels.shape[2] == 1 else "clip"].append(error)
        if trainer.step % 50 == 0:
            means = " ".join(f"{kind} {np.mean(values[-25:]):.5f}" for kind, values in errors.items() if values)
            print(f"step {trainer.step} mse {means} {time.time() - start:.0f} s", flush=True)
        if trainer.step % 50 == 0 or trainer.step == steps:
            trainer.save()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the training state")
    parser.add_argument("--half", choices=LOSSES, required=True)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    train(Trainer(args.work, args.half, peak=args.learning_rate), args.steps)


if __name__ == "__main__":
    main()
