"""Export the trained networks as a diffusers pipeline, with latent-to-RGB factors for previews.

python -m training.export --work DIR --to checkpoints/shapes
"""

import argparse
import json
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from training.captions import save_tokenizer
from training.codec import shapes_codec
from training.data import STILLS, random_clip
from training.sampling import SHIFT
from training.train_transformer import Trainer
from training.train_vae import trained_vae

LARGEST_BYTES = 25_000_000
SCENES = 200


def latent_to_rgb() -> tuple[Tensor, Tensor]:
    """Fit a linear map from normalised latents to pixels in -1..1; return its ``factors [16, 3]`` and ``bias [3]``."""
    rng = random.Random("latent2rgb")
    latents, colours = [], []
    for index in range(SCENES):
        _, pixels = random_clip(rng, STILLS[index % 4])
        latents.append(shapes_codec().encode(pixels[None])[0, :, 0].flatten(1).T)
        colours.append(F.avg_pool2d(pixels[:, 0], 8).flatten(1).T)
    inputs = torch.cat(latents)
    inputs = torch.cat([inputs, torch.ones(len(inputs), 1)], 1)
    solution = torch.linalg.lstsq(inputs, torch.cat(colours)).solution
    return solution[:-1], solution[-1]


def write_index(folder: Path) -> None:
    """Write ``model_index.json`` with class names that old and new versions of transformers know."""
    index = {
        "_class_name": "WanPipeline",
        "_diffusers_version": "0.38.0",
        "boundary_ratio": None,
        "expand_timesteps": False,
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def export(work: Path, folder: Path) -> int:
    """Write all parts of the pipeline to a folder and return its size in bytes.

    Args:
        work: folder of the training state.
        folder: folder of the pipeline.

    Raises:
        RuntimeError: ``work`` holds no trained transformer, or the pipeline exceeds ``LARGEST_BYTES``.
    """
    trainer = Trainer(work, peak=0.0)
    if not trainer.step:
        raise RuntimeError(f"{work} holds no trained transformer")
    folder.mkdir(parents=True, exist_ok=True)
    average = trainer.average
    average.transformer.save_pretrained(folder / "transformer")
    average.text_encoder.save_pretrained(folder / "text_encoder")
    trained_vae(work).save_pretrained(folder / "vae")
    FlowMatchEulerDiscreteScheduler(shift=SHIFT).save_pretrained(folder / "scheduler")
    save_tokenizer(folder / "tokenizer")
    write_index(folder)
    factors, bias = latent_to_rgb()
    preview = {"factors": factors.round(decimals=5).tolist(), "bias": bias.round(decimals=5).tolist()}
    (folder / "latent2rgb.json").write_text(json.dumps(preview, indent=1) + "\n")
    written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if written > LARGEST_BYTES:
        raise RuntimeError(f"{folder} holds {written} bytes, more than {LARGEST_BYTES}")
    return written


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the training state")
    parser.add_argument("--to", type=Path, required=True, help="folder of the pipeline")
    args = parser.parse_args()
    print(f"{export(args.work, args.to) / 1e6:.1f} MB in {args.to}")


if __name__ == "__main__":
    main()
