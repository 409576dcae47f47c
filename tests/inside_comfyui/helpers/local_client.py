"""A client that computes in this process with diffusers' own modules, and records the requests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.ldm.common_dit
import torch
from any_folder_name.parallel_backend.client.exchange import Timeouts
from any_folder_name.parallel_backend.engine.text_encoding import encode
from any_folder_name.parallel_backend.protocol.endpoint import Endpoint
from any_folder_name.parallel_backend.samplers.interface import run_sampler
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import Tensor
from transformers import UMT5EncoderModel

Report = Callable[[Any, dict[str, Tensor]], None]


class LocalClient:
    """Answers ``attempt`` like the backend.

    Attributes:
        requests: every message with its tensors.
    """

    remote, endpoint, timeouts = False, Endpoint(folder=Path("/nowhere")), Timeouts()

    def __init__(self, folder: Path, sampler: Callable[..., Any], progress: type) -> None:
        self.requests: list[tuple[Any, dict[str, Tensor]]] = []
        self._sampler, self._progress = sampler, progress
        self._transformer = WanTransformer3DModel.from_pretrained(folder, subfolder="transformer")
        self.vae = AutoencoderKLWan.from_pretrained(folder, subfolder="vae")
        self.text_encoder = UMT5EncoderModel.from_pretrained(folder / "text_encoder")

    def hosts(self) -> tuple[()]:
        """Say that there is no other host."""
        return ()

    def status(self) -> None:
        """Say that the backend runs."""

    def expect(self, devices: Any) -> None:
        """Do nothing: there are no ranks."""

    def end_run(self) -> None:
        """Do nothing: each step is a request."""

    @property
    def work(self) -> list[Any]:
        """The messages that make ranks compute. An ``Unload`` may be of a model of an earlier test, which is freed."""
        return [message for message, _ in self.requests if type(message).__name__ != "Unload"]

    def of_kind(self, name: str) -> list[Any]:
        """Return the messages of one kind."""
        return [message for message, _ in self.requests if type(message).__name__ == name]

    @torch.no_grad()
    def attempt(
        self,
        message: Any,
        tensors: dict[str, Tensor] | None = None,
        *,
        interrupted: Callable[[], bool] | None = None,
        on_progress: Report | None = None,
    ) -> dict[str, Tensor]:
        """Execute a request."""
        tensors = {name: tensor.cpu() for name, tensor in (tensors or {}).items()}
        self.requests.append((message, tensors))
        answer: dict[str, Tensor] = getattr(self, f"_{type(message).__name__}")(message, tensors, on_progress)
        return answer

    def _predict(self, x: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        padded = comfy.ldm.common_dit.pad_to_patch_size(x, (1, 2, 2))
        prediction: Tensor = self._transformer(padded, timestep, text, return_dict=False)[0]
        return prediction[..., : x.shape[-2], : x.shape[-1]]

    def _Forward(self, message: Any, tensors: dict[str, Tensor], _: Any) -> dict[str, Tensor]:
        _check_plain(message)
        assert not message.skipped, "this client leaves out no block"
        names = ("hidden_states", "timestep", "encoder_hidden_states")
        return {str(i): self._predict(*(tensors[f"{i}.{name}"] for name in names)) for i in range(message.branches)}

    def _Sample(self, message: Any, tensors: dict[str, Tensor], on_progress: Report) -> dict[str, Tensor]:
        _check_plain(message)
        texts = [tensors[f"{i}.encoder_hidden_states"] for i in range(message.branches)]
        steps = len(tensors["sigmas"]) - 1

        def denoise(x: Tensor, sigma: Tensor) -> Tensor:
            timestep = (sigma * message.timestep_scale).expand(len(x))
            x0 = [x - sigma * self._predict(x, timestep, text) for text in texts]
            return x0[-1] + (x0[0] - x0[-1]) * message.cfg

        def inpaint(x: Tensor, sigma: Tensor) -> Tensor:
            if "mask" not in tensors:
                return denoise(x, sigma)
            keep = 1 - tensors["mask"]
            known = sigma * tensors["noise"] + (1 - sigma) * tensors["latent"]
            return denoise(x * tensors["mask"] + known * keep, sigma) * tensors["mask"] + tensors["latent"] * keep

        def on_step(i: int, x0: Tensor, _: Any) -> None:
            preview = {"preview": x0[:1, :, :1]} if message.previews else {}
            on_progress(self._progress(phase="sampling", value=i + 1, total=steps), preview)

        x, sigmas = tensors["x"], tensors["sigmas"]
        sampler = self._sampler(message, sigmas, x.shape).of_part(lambda whole: whole)
        return {"samples": run_sampler(sampler, inpaint, x, sigmas, on_step)}

    def _EncodeText(self, message: Any, tensors: dict[str, Tensor], _: Any) -> dict[str, Tensor]:
        _check_plain(message)
        return {"embeds": encode(self.text_encoder, tensors["ids"], tensors["lengths"], layer=message.layer)}

    def _Unload(self, message: Any, tensors: dict[str, Tensor], _: Any) -> dict[str, Tensor]:
        return {}

    def _Decode(self, message: Any, tensors: dict[str, Tensor], _: Any) -> dict[str, Tensor]:
        pixels = self.vae.decode(tensors["latent"]).sample
        return {"pixels": ((pixels + 1) / 2).clamp(0, 1).movedim(1, -1)}

    def _Encode(self, message: Any, tensors: dict[str, Tensor], _: Any) -> dict[str, Tensor]:
        return {"latent": self.vae.encode(tensors["pixels"].movedim(-1, 1) * 2 - 1).latent_dist.mode()}


def _check_plain(message: Any) -> None:
    """Refuse changed weights, which this client would ignore."""
    assert not any(message.adapters), "this client applies no LoRA"
    assert message.overlay is None, "this client changes no weight"
