"""A whole prompt, as in a workflow: encode texts, sample and decode."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.client.client import Client
from parallel_backend.protocol.messages import Decode, EncodeText, Progress, Sample
from parallel_backend.protocol.model_spec import ModelSpec

SHIPPED = Path(__file__).resolve().parents[2] / "checkpoints" / "shapes"
"""The checkpoint that comes with the extension; an installed package lacks it."""
LATENT = (1, 16, 5, 16, 16)
"""Shape of the latent, a video of 17 frames of 128 x 128 pixels."""
STEPS = 24
TEXT = 64
"""Width of a text's embedding."""
TEXT_LENGTH = 512


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt with guidance, so with two texts.

    Attributes:
        spec: the model. Parts that its checkpoint lacks are left out of the prompt.
    """

    spec: ModelSpec

    def run(self, client: Client, on_step: Callable[[int], None] = lambda step: None) -> float:
        """Run the prompt and return its seconds. ``on_step`` is called with the number of finished steps.

        Raises:
            BackendError: a request fails.
        """
        parts = open_checkpoint(Path(self.spec.path)).components
        started = time.perf_counter()
        texts = [self._encode(client, text) if "text_encoder" in parts else _text() for text in range(2)]
        tensors = {"x": torch.randn(LATENT), "sigmas": torch.linspace(1, 0, STEPS + 1)}
        tensors |= {f"{i}.encoder_hidden_states": text for i, text in enumerate(texts)}

        def progressed(progress: Progress, _: dict[str, Tensor]) -> None:
            if progress.phase == "sampling":
                on_step(progress.value)

        message = Sample(model=self.spec, branches=2, sampler="euler", cfg=3.0)
        samples = client.call(message, tensors, on_progress=progressed)["samples"]
        if "vae" in parts:
            client.call(Decode(model=self.spec), {"latent": samples})
        return time.perf_counter() - started

    def _encode(self, client: Client, seed: int) -> Tensor:
        ids = torch.randint(2, 30, (1, 12), generator=torch.Generator().manual_seed(seed))
        reply = client.call(EncodeText(model=self.spec), {"ids": ids, "lengths": torch.tensor([ids.shape[1]])})
        embeds = reply["embeds"]
        return torch.nn.functional.pad(embeds, (0, 0, 0, TEXT_LENGTH - embeds.shape[1]))


def _text() -> Tensor:
    return torch.randn(1, TEXT_LENGTH, TEXT)


def shipped_or_tiny(folder: Path) -> str:
    """Return the path of the shipped checkpoint or, without one, of a tiny model written to ``folder``."""
    if SHIPPED.is_dir():
        return str(SHIPPED)
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    sizes = {"num_attention_heads": 4, "attention_head_dim": 24, "freq_dim": 32, "ffn_dim": 64, "num_layers": 2}
    WanTransformer3DModel(patch_size=(1, 2, 2), text_dim=TEXT, **sizes).save_pretrained(folder / "transformer")
    index = {"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"]}
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    return str(folder)
