"""The ranks' samplers and padding against ComfyUI's own functions, with a toy denoiser."""

from types import SimpleNamespace
from typing import Any

import comfy.ldm.common_dit
import comfy.model_sampling
import comfy.samplers
import pytest
import torch
from any_folder_name.parallel_backend.families.wan.transformer import pad_to_patch
from any_folder_name.parallel_backend.protocol.messages import Sample
from any_folder_name.parallel_backend.protocol.model_spec import Devices, ModelSpec
from any_folder_name.parallel_backend.samplers.interface import run_sampler
from any_folder_name.parallel_backend.samplers.samplers import SAMPLERS
from any_folder_name.parallel_backend.step_loop.request_sampler import RequestSampler
from helpers.inside_fixtures import relative_error

SIGMAS = {
    "to zero": [1.0, 0.93, 0.8, 0.55, 0.31, 0.12, 0.0],
    "stopped early": [1.0, 0.93, 0.8, 0.55, 0.31, 0.12],
    "started late": [0.62, 0.4, 0.25, 0.1, 0.0],
    "two steps": [0.9, 0.4, 0.0],
    "one step": [0.9, 0.0],
}
MODEL = ModelSpec(path="", devices=Devices(kind="cpu", indices=(0,)))
SEED = 2**63 + 7


class Flow(comfy.model_sampling.ModelSamplingDiscreteFlow, comfy.model_sampling.CONST):  # type: ignore[misc]
    """The sampling of flow models."""


class Eps(comfy.model_sampling.ModelSamplingDiscrete, comfy.model_sampling.EPS):  # type: ignore[misc]
    """The sampling of noise-predicting models."""


class Toy:
    """A denoiser whose x0 depends on ``x`` and on ``sigma``, in the objects that ComfyUI passes to a sampler."""

    def __init__(self, model_sampling: Any) -> None:
        patcher = SimpleNamespace(get_model_object=lambda name: model_sampling)
        self.inner_model = SimpleNamespace(
            inner_model=SimpleNamespace(model_sampling=model_sampling), model_patcher=patcher
        )

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor, **_: Any) -> torch.Tensor:
        sigma = sigma.view(-1, *[1] * (x.ndim - 1))
        return torch.tanh(1.3 * x / (1 + sigma) + 0.4) * (1.0 - 0.5 * sigma / (1 + sigma)) + 0.1


@pytest.mark.parametrize("scale", [1.0, 14.0, 4000.0], ids=["flow", "eps", "zero-SNR"])
@pytest.mark.parametrize("schedule", SIGMAS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_sampler_equals_comfyui(sampler: str, schedule: str, scale: float) -> None:
    model_sampling = Flow() if scale == 1.0 else Eps()
    sigmas = torch.tensor(SIGMAS[schedule]) * (1.0 if scale == 1.0 else torch.tensor(SIGMAS[schedule]) ** 2 * scale)
    toy = Toy(model_sampling)
    x = torch.randn(2, 4, 1, 3, 3, generator=torch.Generator().manual_seed(3)) * sigmas[0]
    steps: list[tuple[int, torch.Tensor]] = []
    core_steps: list[tuple[int, torch.Tensor]] = []
    expected = comfy.samplers.sampler_object(sampler).sampler_function(
        toy, x, sigmas.clone(), extra_args={"seed": SEED}, disable=True,
        callback=lambda step: core_steps.append((step["i"], step["denoised"].clone())),
    )  # fmt: skip
    message = Sample(
        model=MODEL, branches=1, sampler=sampler, cfg=1.0, prediction="flow" if scale == 1.0 else "eps", seed=SEED,
        first_sigma=model_sampling.percent_to_sigma(1e-4) if scale == 1.0 else 1.0,
    )  # fmt: skip
    ours = RequestSampler(message, sigmas, x.shape)
    samples = run_sampler(
        ours.of_part(lambda whole: whole), toy, x, sigmas, lambda i, denoised, _: steps.append((i, denoised))
    )
    assert relative_error(samples, expected) < (1e-4 if scale > 1000 else 1e-5)
    assert [i for i, _ in steps] == [i for i, _ in core_steps]
    for (_, denoised), (_, core_denoised) in zip(steps, core_steps, strict=True):
        assert relative_error(denoised, core_denoised) < (3e-3 if sampler.startswith("uni_pc") else 1e-4)
    assert len(ours.calls()) >= len(sigmas) - 1


@pytest.mark.parametrize("patch", [(1, 2, 2), (2, 2, 2), (1, 4, 4)])
@pytest.mark.parametrize("size", [(1, 4, 4), (3, 5, 7), (2, 6, 5)])
def test_padding_equals_comfyui(patch: tuple[int, int, int], size: tuple[int, int, int]) -> None:
    latent = torch.randn(2, 3, *size)
    assert torch.equal(pad_to_patch(latent, patch), comfy.ldm.common_dit.pad_to_patch_size(latent, patch))
