"""Train the transformer and the text encoder of "shapes" together by flow matching, resuming where they stopped.

    python -m training.train_transformer --work DIR --steps 33000

Every step draws new scenes; their latents are the codec's, so this runs before or beside the VAE's
training. ``x_s = (1 - s) x_0 + s noise``; the network predicts ``noise - x_0`` at
timestep ``1000 s``. Matrices learn by Muon, the rest by AdamW; the exported weights are an
exponential moving average.
"""

import argparse
import copy
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

from training.captions import new_tokenizer, training_caption
from training.data import random_bucket, random_latents
from training.muon import Muon
from training.networks import encode_text, new_text_encoder, new_transformer, padding_bias, share_padding

BATCH_TOKENS = 2048
TIMESTEPS = 1000.0
EMA_DECAY = 0.998
SHORTER_SHARE = 0.3
SAVE_EVERY = 50


class Nets(nn.Module):
    """Transformer and text encoder, trained as one."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer: WanTransformer3DModel = new_transformer()
        self.text_encoder: UMT5EncoderModel = new_text_encoder()
        self.padding = share_padding(self.transformer)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Latents ``[B, 16, T, h, w]`` of one size, prompt ids and mask ``[B, L]``."""

    latents: Tensor
    ids: Tensor
    mask: Tensor


def kept_frames(rng: random.Random, frames: int) -> int:
    """How many latent frames of a clip to train on; the VAE is causal, so a clip's beginning is a clip."""
    return rng.randint(2, frames) if frames > 1 and rng.random() < SHORTER_SHARE else frames


def random_batch(rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> Batch:
    """New scenes of one size, about ``BATCH_TOKENS`` tokens together, each with a caption."""
    bucket = random_bucket(rng)
    latents, scenes = random_latents(rng, bucket, max(4, BATCH_TOKENS // bucket.tokens))
    latents = latents[:, :, : kept_frames(rng, latents.shape[2])]
    text = tokenizer([training_caption(rng, scene) for scene in scenes], padding=True, return_tensors="pt")
    room = (0, 1)
    return Batch(
        latents=latents,
        ids=nn.functional.pad(text.input_ids, room),
        mask=nn.functional.pad(text.attention_mask, room),
    )


def random_sigmas(count: int, generator: torch.Generator) -> Tensor:
    """Half shifted logit-normal, half uniform, stratified within each half; ``[count]`` in 0..1."""
    strata = (torch.randperm(count, generator=generator) + torch.rand(count, generator=generator)) / count
    shifted = torch.sigmoid(torch.special.ndtri(strata.clamp(1e-4, 1 - 1e-4)))
    shifted = 5 * shifted / (1 + 4 * shifted)
    uniform = strata.clamp(1e-3, 1.0)
    return torch.where(torch.rand(count, generator=generator) < 0.5, shifted, uniform)


def loss_of(nets: Nets, batch: Batch, generator: torch.Generator) -> Tensor:
    """Mean squared error of the predicted velocity."""
    sigmas = random_sigmas(len(batch.latents), generator)
    noise = torch.randn(batch.latents.shape, generator=generator)
    s = sigmas.view(-1, 1, 1, 1, 1)
    noisy = (1 - s) * batch.latents + s * noise
    nets.padding.bias = padding_bias(batch.mask)
    text = encode_text(nets.text_encoder, batch.ids, batch.mask)
    (velocity,) = nets.transformer(noisy, sigmas * TIMESTEPS, text, return_dict=False)
    return nn.functional.mse_loss(velocity, noise - batch.latents)


def split_parameters(nets: Nets) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices inside blocks, for Muon, and everything else."""
    matrices = [p for p in nets.transformer.blocks.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    return matrices, [p for p in nets.parameters() if id(p) not in chosen]


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Warm-up over 200 steps, flat, then linear to a fiftieth over the last quarter."""
    return peak * min(1.0, (step + 1) / 200) * min(1.0, max(0.02, (steps - step) / (0.25 * steps)))


class Trainer:
    """Networks, their average, optimizers and step count, saved to and resumed from one file."""

    def __init__(self, work: Path, *, peak: float) -> None:
        torch.manual_seed(0)
        self.nets = Nets()
        self.average = copy.deepcopy(self.nets).requires_grad_(False)
        self.peak, self.step, self.file = peak, 0, work / "transformer.pt"
        matrices, others = split_parameters(self.nets)
        self.optimizers = [
            Muon(matrices, lr=peak),
            torch.optim.AdamW(others, lr=peak, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        if self.file.exists():
            self._resume()

    def _resume(self) -> None:
        state = torch.load(self.file, weights_only=True)
        self.nets.load_state_dict(state["nets"])
        self.average.load_state_dict(state["average"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]

    def save(self) -> None:
        """Write the state; a kill in the middle leaves the previous one."""
        state = {
            "nets": self.nets.state_dict(),
            "average": self.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
        }
        torch.save(state, self.file.with_suffix(".new"))
        self.file.with_suffix(".new").replace(self.file)

    def update(self, batch: Batch, steps: int) -> float:
        """One step; returns the loss. The noise depends on the step alone, so a resumed run repeats it."""
        generator = torch.Generator().manual_seed(self.step)
        loss = loss_of(self.nets, batch, generator)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(self.step, steps, self.peak)
        loss.backward()
        nn.utils.clip_grad_norm_(self.nets.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        self._average()
        return loss.item()

    @torch.no_grad()
    def _average(self) -> None:
        decay = min(EMA_DECAY, (1 + self.step) / (10 + self.step))
        for mean, weight in zip(self.average.parameters(), self.nets.parameters(), strict=True):
            mean.lerp_(weight, 1 - decay)


def train(trainer: Trainer, steps: int) -> None:
    """Train to ``steps``; prints the mean loss of stills and of clips."""
    began, tokenizer = time.time(), new_tokenizer()
    losses: dict[str, list[float]] = {"still": [], "clip": []}
    while trainer.step < steps:
        batch = random_batch(random.Random(trainer.step), tokenizer)
        loss = trainer.update(batch, steps)
        losses["still" if batch.latents.shape[2] == 1 else "clip"].append(loss)
        if trainer.step % 50 == 0:
            means = " ".join(f"{kind} {sum(v[-25:]) / len(v[-25:]):.4f}" for kind, v in losses.items() if v)
            print(f"step {trainer.step} loss {means} {time.time() - began:.0f} s", flush=True)
        if trainer.step % SAVE_EVERY == 0 or trainer.step == steps:
            trainer.save()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the training state")
    parser.add_argument("--steps", type=int, default=33000)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    train(Trainer(args.work, peak=args.learning_rate), args.steps)


if __name__ == "__main__":
    main()
