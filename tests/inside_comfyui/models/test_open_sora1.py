"""Open-Sora 1.2 from one file in the published names: layers in ComfyUI's process against ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.samplers
import folder_paths
import pytest
import torch
from any_folder_name.nodes.loader import ParallelLoader
from any_folder_name.nodes.model import ParallelModel
from any_folder_name.nodes.open_sora1.prompt import ParallelOpenSora1Prompt
from any_folder_name.nodes.open_sora1.video import ParallelOpenSora1Video
from any_folder_name.nodes.sampler import ParallelSampler
from any_folder_name.nodes.vae import ParallelVAE, ParallelVAEDecode
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from helpers import compressed_files, loras, open_sora1
from helpers.executor import Executor, Given, Prompt
from helpers.freeing_client import FreeingClient
from helpers.inside_fixtures import Loaded, ksampler, new_session, parallel_sampler, relative_error
from natives.case import seeded
from safetensors.torch import load_file

from scripts import workflows

pytestmark = pytest.mark.newest

CLOSE = 1e-4
NODES = (
    ParallelLoader, ParallelOpenSora1Prompt, ParallelOpenSora1Video, ParallelSampler, ParallelVAE, ParallelVAEDecode,
)  # fmt: skip
SIZE = {"width": 78, "height": 90, "length": 34, "frame_rate": 12.0}
"""A latent of 10 x 11 x 9: neither side is a whole number of patches, nor the video's a whole number of latents."""


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in ComfyUI's folder for diffusion models."""
    folder: Path = tmp_path_factory.mktemp("diffusion_models")
    folder_paths.folder_names_and_paths["diffusion_models"][0][:] = [str(folder)]
    return open_sora1.write(folder)


@pytest.fixture
def load(file: Path, load_remote: Callable[..., Loaded]) -> Callable[..., Any]:
    """``load(layout)`` returns Parallel Loader's MODEL of a file beside the small one, or of that."""

    def run(layout: str | None, devices: str = "0,1", name: str = file.name) -> Any:
        parsed = None if layout is None else ParallelLayout.parse(layout)
        return load_remote(parsed, name=f"diffusion_models/{name}", devices=devices).model

    return run


def prompt(seed: int, tokens: int = 7, batch: int = 1) -> list[Any]:
    return [[seeded(seed)(batch, tokens, 32), {}]]


class VAE:
    """Encodes frames into random numbers that follow from their mean, with the shapes of Open-Sora's VAE."""

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        frames, height, width, _ = pixels.shape
        random = seeded(int(pixels.mean() * 1000))
        return random(1, 4, frames // 17 * 5 - (-(frames % 17) // 4), height // 8, width // 8)


def image(seed: int, frames: int = 1) -> torch.Tensor:
    return torch.rand(frames, 60, 50, 3, generator=torch.Generator().manual_seed(seed))


def video(model: Any, *, negative: list[Any] | None = None, batch: int = 1, **changed: Any) -> tuple[Any, ...]:
    """Return what the node gives: a model, and a sampler's arguments."""
    options: dict[str, Any] = {**SIZE, "positive": prompt(1), "negative": negative, "vae": VAE(), **changed}
    patched, positive, negative, latent = ParallelOpenSora1Video.execute(model, batch_size=batch, **options).args
    return patched, latent, {"positive": positive, "negative": negative, "cfg": 5.0}


KINDS: dict[str, dict[str, Any]] = {
    "text": {"batch": 2, "negative": prompt(2, tokens=5)},
    "learned": {},
    "first": {"start": image(1)},
    "both": {"start": image(1), "end": image(2), "batch": 2},
    "edited": {"start": image(3, frames=17), "start_edit": 0.6},
    "image": {"length": 1, "frame_rate": 24.0},
}
LAYOUTS = ("ulysses=2", "dsp=2", "cfg=2", "ring=2", "tensor=2", "pipe=2 patches=1", "dsp=2 shard_weights")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.daily(2)
def test_ranks_give_what_one_process_gives(kind: str, file: Path, load: Callable[..., Any]) -> None:
    whole, latent, options = video(open_sora1.without_backend(file), **KINDS[kind])
    reference = ksampler(whole, latent, **options)
    for other in ({"cfg": 1.0}, {"positive": prompt(9)}):
        assert relative_error(ksampler(whole, latent, **options | other), reference) > 0.01
    place = list(KINDS).index(kind)
    for layout in (LAYOUTS[place], LAYOUTS[(place + 1) % len(LAYOUTS)]):
        model, latent, options = video(load(layout), **KINDS[kind])
        for sample in (ksampler, parallel_sampler):
            error = relative_error(sample(model, latent, **options), reference)
            assert error < CLOSE, f"{sample.__name__}, {layout}: {error:.1e}"


def test_without_a_layout_ranks_exchange_frames(file: Path, load: Callable[..., Any], backend: FreeingClient) -> None:
    """Three ranks have 4, 3 and 3 of 10 frames."""
    whole, latent, options = video(open_sora1.without_backend(file), **KINDS["edited"])
    reference = ksampler(whole, latent, **options)
    model, latent, options = video(load(None, devices="0,1,2"), **KINDS["edited"])
    for sample in (ksampler, parallel_sampler):
        assert relative_error(sample(model, latent, **options), reference) < CLOSE
    assert str(backend.status().layout) == "dsp=3"


@pytest.mark.parametrize(
    "layout", ["tensor=2", "dsp=2", pytest.param("ulysses=2 shard_weights", marks=pytest.mark.newest)]
)
def test_loras_equal_comfyui(layout: str, file: Path, load: Callable[..., Any]) -> None:
    plain = open_sora1.without_backend(file)
    changes = [
        (loras.plain(plain, dialect, rank=4, seed=seed, alpha=3.0), strength)
        for dialect, seed, strength in (("diffusion_model.", 1, 0.7), ("lora_unet_", 2, -0.4))
    ]
    whole, latent, options = video(plain, start=image(1))
    unchanged = ksampler(whole, latent, **options)
    reference = ksampler(loras.on_model(whole, *changes), latent, **options)
    assert relative_error(unchanged, reference) > 100 * CLOSE
    model, latent, options = video(load(layout), start=image(1))
    changed = loras.on_model(model, *changes)
    for sample in (ksampler, parallel_sampler):
        assert relative_error(sample(changed, latent, **options), reference) < CLOSE


@pytest.mark.newest
def test_each_number_of_the_video_counts(file: Path) -> None:
    whole, latent, options = video(open_sora1.without_backend(file))
    reference = ksampler(whole, latent, **options)
    for changed in ({"frame_rate": 30.0}, {"width": 76}):  # the latent is as wide
        other, latent, options = video(open_sora1.without_backend(file), **changed)
        assert relative_error(ksampler(other, latent, **options), reference) > 10 * CLOSE, changed


def test_given_frames_stay(file: Path, load: Callable[..., Any]) -> None:
    model, latent, options = video(load("ulysses=2"), start=image(1), end=image(2, frames=17))
    samples = parallel_sampler(model, latent, **options)
    given = [0, *range(5, 10)]
    assert (samples[:, :, given] - latent["samples"][:, :, given]).abs().max() < 1e-5
    assert latent["noise_mask"].flatten().tolist() == [0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.newest
def test_an_edited_frame_joins_late_and_changes(file: Path) -> None:
    whole, latent, options = video(open_sora1.without_backend(file), start=image(1), start_edit=0.5)
    samples = ksampler(whole, latent, **options, steps=4)
    first, given = samples[:, :, 0], latent["samples"][:, :, 0]
    assert (first - given).abs().max() > 0.1
    calls = whole.model.diffusion_model.inputs
    times = sorted({float(call["timestep"][0]) for call in calls}, reverse=True)
    assert times[0] > 500 > times[-1]
    for call in calls:
        kept = torch.equal(call["x"][:1, :, 0], given)
        assert kept == (float(call["timestep"][0]) > 500)


def test_no_negative_prompt_is_the_learned_text_with_the_positives_length(file: Path) -> None:
    table = load_file(file)["y_embedder.y_embedding"]
    for negative in (None, prompt(2, tokens=1)):
        _, _, options = video(open_sora1.without_backend(file), negative=negative)
        assert torch.equal(options["negative"][0][0], table[None, :7])
    _, _, options = video(open_sora1.without_backend(file), negative=prompt(2, tokens=5))
    assert torch.equal(options["negative"][0][0], prompt(2, tokens=5)[0][0])


def test_the_times_are_the_authors(file: Path) -> None:
    """Of 51 frames of 426 x 240 and 50 steps; ``RFLOW`` gives 1 - i / n, shifted by 2.419."""
    model, _, _ = video(open_sora1.without_backend(file), width=426, height=240, length=51)
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", 50)
    alpha, even = (240 * 426 / 512**2 * 15) ** 0.5, 1 - torch.arange(51) / 50
    assert (sigmas - alpha * even / (1 + (alpha - 1) * even)).abs().max() < 1e-6


def test_a_prompt_gets_its_ends_and_is_cleaned() -> None:
    made = ParallelOpenSora1Prompt.execute("A  cat (small)", 6.5, 4.0, "pan left").args[0]
    assert made == "a cat small aesthetic score: 6.5. motion score: 4.0. camera motion: pan left."
    assert ParallelOpenSora1Prompt.execute("A cat", 0.0, 0.0, "").args[0] == "a cat"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"start": image(1, frames=34)}, "the given frames take 10 latent frames, and the video has 10"),
        ({"start": image(1), "vae": None}, "connect vae"),
        ({"positive": prompt(1, tokens=13)}, "a prompt of 13 tokens is too long: Open-Sora takes at most 12"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], message: str, file: Path) -> None:
    with pytest.raises(InvalidRequest, match=message):
        video(open_sora1.without_backend(file), **changed)


def test_a_mask_of_a_part_of_a_frame_is_refused(load: Callable[..., Any]) -> None:
    model, latent, options = video(load("ulysses=2"))
    mask = torch.ones(1, 1, 10, 11, 9)
    mask[..., :4] = 0
    with pytest.raises(InvalidRequest, match="covers a part of a frame"):
        ksampler(model, {**latent, "noise_mask": mask}, **options)


@pytest.mark.parametrize("start", [False, True], ids=["text", "image"])
@pytest.mark.daily(1)
def test_the_workflow_gives_what_one_process_gives(
    start: bool, file: Path, backend: FreeingClient, tmp_path: Path
) -> None:
    """With tiny text: the file of the model by our loader, that of the VAE by Load VAE, which ComfyUI cannot read."""
    new_session(backend)
    folder_paths.folder_names_and_paths["vae"][0][:] = [str(tmp_path)]
    folder_paths.filename_list_cache.clear()
    open_sora1.write_vae(tmp_path).rename(tmp_path / "model.safetensors")
    values = SIZE | {"steps": 3, "model_name": f"diffusion_models/{file.name}", "devices": "0,1"}
    kept: Prompt = {}
    for key, node in workflows.api("Open-Sora 1.2, text to video").items():
        kind, inputs = node["class_type"], {**node["inputs"]}
        if kind in ("CLIPLoader", "CLIPTextEncode"):
            kind, inputs = "Given", {"key": "clip" if kind == "CLIPLoader" else "text"}
        inputs |= {name: value for name, value in values.items() if name in inputs}
        if kind == "ParallelOpenSora1Video" and start:
            kept["image"] = {"class_type": "Given", "inputs": {"key": "image"}}
            inputs["start"] = ["image", 0]
        if kind not in ("CreateVideo", "SaveVideo"):
            kept[key] = {"class_type": kind, "inputs": inputs}
    outputs = {"latent": "ParallelSampler", "pixels": "ParallelVAEDecode"}
    for name, kind in outputs.items():
        (key,) = (key for key, node in kept.items() if node["class_type"] == kind)
        kept[name] = {"class_type": "Recorder", "inputs": {"value": [key, 0]}}
    Given.values = {"clip": None, "text": prompt(1), "image": image(1), "model": open_sora1.without_backend(file)}
    latent, pixels = Executor(*NODES).run(kept)
    module = open_sora1.vae_module()
    options: dict[str, Any] = {"seed": 1, "steps": 3, "cfg": 7.0, "sampler_name": "euler", "scheduler": "simple"}
    model, empty, prompts = video(
        open_sora1.without_backend(file), **({"start": image(1), "vae": InProcess(module)} if start else {})
    )
    wanted = ksampler(model, empty, **{**prompts, **options})
    assert wanted.shape == (1, 4, 10, 11, 9)
    assert wanted.std() > 0.01
    assert relative_error(latent["samples"], wanted) < CLOSE
    decoded = (module.decode(wanted, 34)[0].movedim(0, -1) + 1) / 2
    assert pixels.shape == (34, 88, 72, 3)
    assert (pixels - decoded.clamp(0, 1)).abs().max() < CLOSE


@pytest.mark.newest
@pytest.mark.parametrize(("kind", "layout"), [("scaled", "tensor=2"), ("described", "ulysses=2")])
def test_compressed_files_equal_their_decoded_weights(
    kind: str, layout: str, file: Path, load: Callable[..., Any]
) -> None:
    weights, compressed = load_file(file), file.with_name(f"{kind}.safetensors")
    if kind == "scaled":
        decoded = compressed_files.write_scaled(compressed, weights)
    else:
        decoded = compressed_files.write_described(compressed, weights, "fp8 e4m3", "int8 by row")
    given = {"start": image(1), "negative": prompt(2, tokens=5)}
    whole, latent, options = video(open_sora1.without_backend(file, decoded), **given)
    reference = ksampler(whole, latent, **options)
    unlike, latent, options = video(open_sora1.without_backend(file), **given)
    assert relative_error(ksampler(unlike, latent, **options), reference) > 10 * CLOSE
    model, latent, options = video(load(layout, name=compressed.name), **given)
    assert relative_error(ksampler(model, latent, **options), reference) < CLOSE


def test_parallel_model_takes_the_place_of_comfyuis_loader(file: Path, backend: FreeingClient) -> None:
    """ComfyUI's loader cannot read the file, and does not run: its node names it."""
    new_session(backend)
    whole, latent, options = video(open_sora1.without_backend(file), start=image(1))
    Given.values = {"positive": prompt(1), "vae": VAE(), "start": image(1)}
    prompt_of: Prompt = {
        "1": {"class_type": "UNETLoader", "inputs": {"unet_name": file.name, "weight_dtype": "default"}},
        "2": {"class_type": "ParallelModel", "inputs": {"model": ["1", 0], "devices": "0,1"}},
        **{name: {"class_type": "Given", "inputs": {"key": name}} for name in Given.values},
        "3": {"class_type": "ParallelOpenSora1Video", "inputs": {
            "model": ["2", 0], **SIZE, "batch_size": 1, **{name: [name, 0] for name in Given.values},
        }},
        "4": {"class_type": "KSampler", "inputs": {
            "model": ["3", 0], "seed": 5, "steps": 3, "cfg": 5.0, "sampler_name": "euler", "scheduler": "simple",
            "positive": ["3", 1], "negative": ["3", 2], "latent_image": ["3", 3], "denoise": 1.0,
        }},
        "5": {"class_type": "Recorder", "inputs": {"value": ["4", 0]}},
    }  # fmt: skip
    (samples,) = Executor(*NODES, ParallelModel).run(prompt_of)
    assert relative_error(samples["samples"], ksampler(whole, latent, **options)) < CLOSE


class InProcess:
    """The VAE in this process."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            latent: torch.Tensor = self.module.encode(pixels.movedim(-1, 0)[None] * 2 - 1)
        return latent
