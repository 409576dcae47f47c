"""Train the transformer and the text encoder of "shapes" together by flow matching. A stopped run is resumed.

    python -m training.train_transformer --work DIR --steps 33000

Every step draws new scenes. Their latents come from the codec, so this can run before or in parallel with the VAE's
training. With ``x_s = (1 - s) x_0 + s noise``, the network predicts ``noise - x_0`` at timestep ``1000 s``. Muon trains
the matrices, AdamW the rest. The exported weights are an exponential moving average.
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
"""Share of batches of clips that are shortened."""
SAVE_EVERY = 50


class Nets(nn.Module):
    """Transformer and text encoder, trained together."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer: WanTransformer3DModel = new_transformer()
        self.text_encoder: UMT5EncoderModel = new_text_encoder()
        self.padding = share_padding(self.transformer)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Latents and prompts of one size.

    Attributes:
        latents: ``[B, 16, T, h, w]``.
        ids: token ids of the prompts, ``[B, L]``.
        mask: 1 on a prompt's tokens, ``[B, L]``.
    """

    latents: Tensor
    ids: Tensor
    mask: Tensor


def random_length(rng: random.Random, frames: int) -> int:
    """Draw how many latent frames of a clip to train on. The VAE is causal, so a clip's beginning is a clip too."""
    return rng.randint(2, frames) if frames > 1 and rng.random() < SHORTER_SHARE else frames


def random_batch(rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> Batch:
    """Draw captioned scenes of one size, with about ``BATCH_TOKENS`` latent tokens in total."""
    bucket = random_bucket(rng)
    latents, scenes = random_latents(rng, bucket, max(4, BATCH_TOKENS // bucket.tokens))
    latents = latents[:, :, : random_length(rng, latents.shape[2])]
    text = tokenizer([training_caption(rng, scene) for scene in scenes], padding=True, return_tensors="pt")
    one_pad = (0, 1)
    return Batch(
        latents=latents,
        ids=nn.functional.pad(text.input_ids, one_pad),
        mask=nn.functional.pad(text.attention_mask, one_pad),
    )


def random_sigmas(count: int, generator: torch.Generator) -> Tensor:
    """Draw ``[count]`` sigmas in 0..1, half shifted logit-normal and half uniform, stratified within each half."""
    strata = (torch.randperm(count, generator=generator) + torch.rand(count, generator=generator)) / count
    shifted = torch.sigmoid(torch.special.ndtri(strata.clamp(1e-4, 1 - 1e-4)))
    shifted = 5 * shifted / (1 + 4 * shifted)
    uniform = strata.clamp(1e-3, 1.0)
    return torch.where(torch.rand(count, generator=generator) < 0.5, shifted, uniform)


def loss_of(nets: Nets, batch: Batch, generator: torch.Generator) -> Tensor:
    """Return the mean squared error of the predicted velocity."""
    sigmas = random_sigmas(len(batch.latents), generator)
    noise = torch.randn(batch.latents.shape, generator=generator)
    s = sigmas.view(-1, 1, 1, 1, 1)
    noisy = (1 - s) * batch.latents + s * noise
    nets.padding.bias = padding_bias(batch.mask)
    text = encode_text(nets.text_encoder, batch.ids, batch.mask)
    (velocity,) = nets.transformer(noisy, sigmas * TIMESTEPS, text, return_dict=False)
    return nn.functional.mse_loss(velocity, noise - batch.latents)


def split_parameters(nets: Nets) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices inside blocks, for Muon, and all other parameters."""
    matrices = [p for p in nets.transformer.blocks.parameters() if p.ndim == 2]
    matrix_ids = {id(p) for p in matrices}
    return matrices, [p for p in nets.parameters() if id(p) not in matrix_ids]


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Warm up over 200 steps, stay flat, then decay linearly to a fiftieth over the last quarter."""
    return peak * min(1.0, (step + 1) / 200) * min(1.0, max(0.02, (steps - step) / (0.25 * steps)))


class Trainer:
    """Networks, their moving average, optimizers and step count, saved to and resumed from one file."""

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
        """Save the state atomically: if the process is killed meanwhile, the previous state remains."""
        state = {
            "nets": self.nets.state_dict(),
            "average": self.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
        }
        torch.save(state, self.file.with_suffix(".new"))
        self.file.with_suffix(".new").replace(self.file)

    def update(self, batch: Batch, steps: int) -> float:
        """Train one step and return the loss. The noise depends only on the step, so a resumed run repeats it."""
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
    """Train up to step ``steps``, printing the mean losses of stills and of clips."""
    start, tokenizer = time.time(), new_tokenizer()
    losses: dict[str, list[float]] = {"still": [], "clip": []}
    while trainer.step < steps:
        batch = random_batch(random.Random(trainer.step), tokenizer)
        loss = trainer.update(batch, steps)
        losses["still" if batch.latents.shape[2] == 1 else "clip"].append(loss)
        if trainer.step % 50 == 0:
            means = " ".join(f"{kind} {sum(v[-25:]) / len(v[-25:]):.4f}" for kind, v in losses.items() if v)
            print(f"step {trainer.step} loss {means} {time.time() - start:.0f} s", flush=True)
        if trainer.step % SAVE_EVERY == 0 or trainer.step == steps:
            trainer.save()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the training state")
    parser.add_argument("--steps", type=int, default=33000)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    train(Trainer(args.work, peak=args.learning_rate), args.steps)


if __name__ == "__main__":
    main()
