"""The families that ComfyUI lacks: diffusers' forward in our custom model class against a real backend of two ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from any_folder_name.nodes.class_label import ParallelClassLabel
from any_folder_name.nodes.loader import ParallelLoader
from any_folder_name.parallel_backend.client.client import Client
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from comfy_extras import nodes_hunyuan
from helpers.custom_cases import CASES, bridge_of, without_backend
from helpers.executor import Executor, Given
from helpers.inside_fixtures import Loaded, ksampler, new_session, parallel_sampler, relative_error
from helpers.native_vaes import WIDTHS, randomize
from helpers.own_templates import small

from scripts import workflows

CLOSE = 1e-4


@pytest.fixture
def folder(models: Path) -> Callable[[str], Path]:
    """``folder(name)`` returns the checkpoint of a case."""

    def write(name: str) -> Path:
        if not (models / name).exists():
            CASES[name].write(models / name)
        return models / name

    return write


def prompts(name: str) -> dict[str, Any]:
    return {"positive": CASES[name].conditioning(1), "negative": CASES[name].conditioning(2, shorter=3)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.daily(1)
def test_ranks_give_what_diffusers_forward_gives(
    name: str, folder: Callable[[str], Path], load_remote: Callable[..., Loaded]
) -> None:
    latent = {"samples": torch.zeros(CASES[name].latent)}
    reference = ksampler(without_backend(folder(name)), latent, **prompts(name))
    assert relative_error(ksampler(without_backend(folder(name)), latent, **prompts(name), cfg=1.0), reference) > 0.01
    for layout in (ParallelLayout(ulysses=2), ParallelLayout(cfg=2)):
        model = load_remote(layout, name=name).model
        for sample in (ksampler, parallel_sampler):
            error = relative_error(sample(model, latent, **prompts(name)), reference)
            assert error < CLOSE, f"{sample.__name__}, {layout}: {error:.1e}"


@pytest.mark.parametrize("name", ["cogvideox 5b", "latte", "dit"])
def test_inpainting_equals_diffusers_forward(
    name: str, folder: Callable[[str], Path], load_remote: Callable[..., Loaded]
) -> None:
    shape = CASES[name].latent
    latent = {"samples": torch.randn(shape), "noise_mask": (torch.rand(1, 1, *shape[-2:]) > 0.5).float()}
    options = {**prompts(name), "denoise": 0.6, "sampler_name": "dpmpp_2m", "scheduler": "sgm_uniform"}
    reference = ksampler(without_backend(folder(name)), latent, **options)
    model = load_remote(ParallelLayout(ulysses=2), name=name).model
    for sample in (ksampler, parallel_sampler):
        assert relative_error(sample(model, latent, **options), reference) < CLOSE


def test_the_workflow_gives_what_diffusers_gives(models: Path, folder: Callable[[str], Path], backend: Client) -> None:
    """With a tiny folder of the workflow's name, and random text."""
    new_session(backend)
    name, case = "CogVideoX 5B, text to video", CASES["cogvideox 5b"]
    (needed,) = workflows.needed_folders(name)
    case.write(models / needed["name"])
    vae = randomize(diffusers.AutoencoderKLCogVideoX(
        **WIDTHS, latent_channels=16, down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4, scaling_factor=case.vae["scaling_factor"],
    ))  # fmt: skip
    vae.save_pretrained(models / needed["name"] / "vae")
    Given.values = {"text": case.conditioning(1), "other text": case.conditioning(2, shorter=3)}
    executor = Executor(ParallelLoader, nodes_hunyuan.EmptyHunyuanLatentVideo)
    latent, pixels = executor.run(small(name, workflows.api(name)))
    settings = {"seed": 1, "steps": 4, "cfg": 6.0, "sampler_name": "euler", "scheduler": "simple"}
    wanted = ksampler(
        without_backend(folder("cogvideox 5b")), {"samples": torch.zeros(1, 16, 3, 11, 9)},
        positive=Given.values["text"], negative=Given.values["other text"], **settings,
    )  # fmt: skip
    assert wanted.std() > 0.01
    assert relative_error(latent["samples"], wanted) < CLOSE
    with torch.no_grad():
        decoded = (vae.decode(wanted).sample[0].permute(1, 2, 3, 0) + 1) / 2
    assert pixels.shape == (9, 88, 72, 3)
    assert (pixels - decoded.clamp(0, 1)).abs().max() < CLOSE


@pytest.mark.parametrize("name", CASES)
def test_schedule_is_that_of_diffusers(name: str, folder: Callable[[str], Path]) -> None:
    sampling = bridge_of(folder(name)).core_config().get_model({}).model_sampling
    alphas = CASES[name].scheduler.alphas_cumprod.double()
    assert (1 / (1 + sampling.sigmas.double() ** 2) - alphas).abs().max() < 1e-6


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_diffusers(name: str, folder: Callable[[str], Path]) -> None:
    sampling = bridge_of(folder(name)).core_config().get_model({}).model_sampling
    scheduler = CASES[name].scheduler
    scheduler.set_timesteps(10)
    now, then = scheduler.timesteps[2:4].tolist()
    sample, out = torch.randn(2, 1, 4, 3, 5)
    step = scheduler.step(out, now, sample)
    sigma, following = sampling.sigmas[now], sampling.sigmas[then]
    x = sample * (1 + sigma**2) ** 0.5
    assert sampling.timestep(sigma[None]).item() == now
    x0 = sampling.calculate_denoised(sigma[None], out, x)
    assert relative_error(x0, step.pred_original_sample) < 1e-5
    euler = x + (x - x0) / sigma * (following - sigma)
    assert relative_error(euler / (1 + following**2) ** 0.5, step.prev_sample) < 1e-5


@pytest.mark.parametrize("name", [name for name in CASES if "i2v" in name])
@pytest.mark.parametrize("masked", [False, True])
def test_image_is_where_diffusers_puts_it(name: str, masked: bool, folder: Callable[[str], Path]) -> None:
    case, model = CASES[name], without_backend(folder(name))
    image, frames = torch.randn(1, 16, 1, 6, 10), case.latent[2]
    extra = {"concat_latent_image": image}
    if masked:
        mask = torch.ones(1, 1, frames, 6, 10)
        mask[:, :, :1] = 0.0
        gray = torch.randn(1, 16, frames - 1, 6, 10)
        extra = {"concat_latent_image": torch.cat([image, gray], dim=2), "concat_mask": mask}
    conds = [[case.conditioning(1)[0][0], extra]]
    ksampler(model, {"samples": torch.zeros(case.latent)}, positive=conds, negative=conds, cfg=1.0, steps=1)
    factor = case.vae["scaling_factor"] ** (-1 if case.vae.get("invert_scale_latents") else 1)
    expected = torch.cat([image * factor, torch.zeros(1, 16, frames - 1, 6, 10)], dim=2)
    assert relative_error(model.model.diffusion_model.latents[0][:, 16:], expected.expand(2, -1, -1, -1, -1)) < 1e-6


@pytest.mark.parametrize(
    ("name", "shape", "extra", "message"),
    [
        (
            "cogvideox 5b",
            (1, 16, 3, 6, 10),
            {"concat_latent_image": torch.zeros(1, 16, 1, 6, 10)},
            "a prompt only",
        ),
        ("cogvideox 5b i2v", (1, 16, 3, 6, 10), {"concat_latent_image": None}, "give the image to both prompts"),
        ("latte", (1, 4, 5, 6, 10), {}, "this Latte makes 3, or 1"),
        ("dit", (1, 4, 8, 6), {}, "only square images"),
        ("dit", (1, 4, 8, 8), {"class_labels": 11}, r"class_labels holds 11, and this model knows 0 to 10"),
        ("dit", (1, 4, 8, 8), {"class_labels": None}, "use Parallel Class Label"),
        *(
            [("cogvideox 1.5", (1, 16, 5, 6, 10), {}, r"5 frames: .* a multiple of 2. Make a video of 21 frames")]
            if "cogvideox 1.5" in CASES
            else []
        ),
    ],
)
def test_unsupported_inputs_are_refused(
    name: str, shape: tuple[int, ...], extra: dict[str, Any], message: str,
    folder: Callable[[str], Path], load_remote: Callable[..., Loaded],
) -> None:  # fmt: skip
    folder(name)
    model = load_remote(ParallelLayout(ulysses=2), name=name).model
    ((text, usual),) = CASES[name].conditioning(1)
    prompt = [[text, usual | extra]]
    options = {"positive": prompt, "negative": prompt}
    for sample in (ksampler, parallel_sampler):
        with pytest.raises(InvalidRequest, match=message):
            sample(model, {"samples": torch.zeros(shape)}, **options)


def test_classes_of_the_node(folder: Callable[[str], Path], load_remote: Callable[..., Loaded]) -> None:
    folder("dit")
    model = load_remote(ParallelLayout(cfg=2), name="dit").model
    latent = {"samples": torch.zeros(1, 4, 8, 8)}
    positive, negative = ParallelClassLabel.execute(3).args
    none, _ = ParallelClassLabel.execute(10).args
    generated = ksampler(model, latent, positive=positive, negative=negative)
    assert relative_error(ksampler(model, latent, positive=positive, negative=none), generated) < CLOSE
    other, _ = ParallelClassLabel.execute(4).args
    assert relative_error(ksampler(model, latent, positive=other, negative=negative), generated) > 0.01


def test_weights_have_diffusers_names(folder: Callable[[str], Path], load_remote: Callable[..., Loaded]) -> None:
    folder("latte")
    weights = load_remote(name="latte").model.model.diffusion_model.state_dict()
    theirs = CASES["latte"].module().state_dict()
    assert {name: tensor.shape for name, tensor in weights.items()} == {name: t.shape for name, t in theirs.items()}


def test_a_model_of_classes_has_no_clip(folder: Callable[[str], Path], load_remote: Callable[..., Loaded]) -> None:
    folder("dit")
    with pytest.raises(InvalidRequest, match="takes a class, not a prompt"):
        load_remote(name="dit").clip.tokenize("a dog")
