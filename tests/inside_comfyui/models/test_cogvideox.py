"""ComfyUI's own CogVideoX class as it is, without *ModelSamplingDiscrete*, and which checkpoints get it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from any_folder_name.nodes.families.registry import bridge_for
from any_folder_name.parallel_backend.checkpoint.opening import open_checkpoint
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from helpers import custom_cases
from helpers.inside_fixtures import ksampler, native_case, parallel_sampler, relative_error
from natives import CASES, HAS_COGVIDEOX

pytestmark = pytest.mark.skipif(not HAS_COGVIDEOX, reason="this version of ComfyUI has no CogVideoX")
CLOSE = 1e-4


def void_sampler(model: Any, latent: dict[str, Any], *, positive: Any, negative: Any) -> torch.Tensor:
    """Run *SamplerCustom* with *VOIDSampler*."""
    from comfy_extras.nodes_custom_sampler import BasicScheduler, SamplerCustom
    from comfy_extras.nodes_void import VOIDSampler

    (sampler,) = VOIDSampler.execute().args
    (sigmas,) = BasicScheduler.execute(model, "simple", 4, 1.0).args
    samples: torch.Tensor = SamplerCustom.execute(
        model, True, 5, 4.0, positive, negative, sampler, sigmas, latent
    ).args[0]["samples"]  # fmt: skip
    return samples


@pytest.mark.parametrize("name", ["cogvideox 1.5", "cogvideox 1.5 i2v", "cogvideox 1.5 inpaint"])
@pytest.mark.parametrize("sample", [void_sampler, ksampler])
@pytest.mark.daily(3)
def test_sampling_equals_comfyui(name: str, sample: Callable[..., Any], load_case: Callable[..., Any]) -> None:
    case = CASES[name]
    latent = {"samples": torch.zeros(case.latent)}
    prompts = {"positive": case.conditioning(1), "negative": case.conditioning(2)}
    reference = sample(native_case(name), latent, **prompts)
    assert torch.isfinite(reference).all()
    for layout in (ParallelLayout(ulysses=2), ParallelLayout(cfg=2)):
        assert relative_error(sample(load_case(name, layout), latent, **prompts), reference) < CLOSE


def test_parallel_sampler_asks_for_another_sampling(load_case: Callable[..., Any]) -> None:
    model = load_case("cogvideox 1.5", ParallelLayout(ulysses=2))
    prompt = CASES["cogvideox 1.5"].conditioning(1)
    with pytest.raises(InvalidRequest, match="put ModelSamplingDiscrete, with v_prediction and zsnr"):
        parallel_sampler(model, CASES["cogvideox 1.5"].samples(), positive=prompt, negative=prompt)


def test_sigmas_are_those_of_the_published_scheduler() -> None:
    from diffusers import CogVideoXDDIMScheduler

    scheduler = CogVideoXDDIMScheduler(snr_shift_scale=1.0, rescale_betas_zero_snr=True)
    sigmas = native_case("cogvideox 1.5").model.model_sampling.sigmas.double()
    assert (1 / (1 + sigmas**2) - scheduler.alphas_cumprod.double()).abs().max() < 1e-6


def test_a_mask_is_refused_which_comfyui_drops(load_case: Callable[..., Any]) -> None:
    case = CASES["cogvideox 1.5 i2v"]
    ((text, extra),) = case.conditioning(1)
    prompt = [[text, extra | {"concat_mask": torch.ones(1, 1, 4, 6, 10)}]]
    with pytest.raises(InvalidRequest, match="concat_mask"):
        ksampler(load_case("cogvideox 1.5 i2v", ParallelLayout()), case.samples(), positive=prompt, negative=prompt)


@pytest.mark.parametrize("name", ["cogvideox 2b", "cogvideox 5b", "cogvideox 5b i2v"])
def test_older_variants_keep_our_class(name: str, tmp_path: Path) -> None:
    custom_cases.CASES[name].write(tmp_path)
    assert type(bridge_for(open_checkpoint(tmp_path))).__name__ == "CogVideoX"


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"in_channels": 33}, "takes 33 channels and predicts 16"), ({"out_channels": 17}, "predicts 17")],
)
def test_other_numbers_of_channels_are_refused(changed: dict[str, int], message: str, tmp_path: Path) -> None:
    case = CASES["cogvideox 1.5"]
    case.describe(tmp_path, {**case.config, **changed})
    with pytest.raises(InvalidRequest, match=message):
        bridge_for(open_checkpoint(tmp_path))
