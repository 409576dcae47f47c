"""Open-Sora 2.0 from one file in the authors' names: layers in ComfyUI's process against ranks."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.samplers
import folder_paths
import pytest
import torch
from any_folder_name.nodes.loader import ParallelLoader
from any_folder_name.nodes.model import ParallelModel
from any_folder_name.nodes.open_sora2.guider import ParallelOpenSora2Guider
from any_folder_name.nodes.open_sora2.prompt import ParallelOpenSora2Prompt
from any_folder_name.nodes.open_sora2.times import ParallelOpenSora2Sampling
from any_folder_name.nodes.open_sora2.video import ParallelOpenSora2Video
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.families.open_sora2.times import times
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from comfy_extras.nodes_custom_sampler import BasicScheduler, KSamplerSelect, RandomNoise, SamplerCustomAdvanced
from comfy_extras.nodes_hunyuan import EmptyHunyuanLatentVideo
from comfy_extras.nodes_wan import WanImageToVideo
from helpers import compressed_files, loras, open_sora2
from helpers.executor import Executor, Given, Prompt
from helpers.freeing_client import FreeingClient
from helpers.inside_fixtures import Loaded, ksampler, new_session, parallel_sampler, relative_error
from natives.case import seeded
from safetensors.torch import load_file

from scripts import workflows

pytestmark = pytest.mark.newest

CLOSE = 1e-4
NODES = (
    ParallelLoader, ParallelOpenSora2Prompt, ParallelOpenSora2Video, ParallelOpenSora2Sampling,
    ParallelOpenSora2Guider, BasicScheduler, KSamplerSelect, RandomNoise, SamplerCustomAdvanced,
)  # fmt: skip
SIZE = {"width": 72, "height": 80, "length": 17}
"""In pixels: a latent of 5 x 10 x 9, whose width is not a whole number of patches."""


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in ComfyUI's folder for diffusion models."""
    folder: Path = tmp_path_factory.mktemp("diffusion_models")
    folder_paths.folder_names_and_paths["diffusion_models"][0][:] = [str(folder)]
    return open_sora2.write(folder)


@pytest.fixture
def load_model(file: Path, load_remote: Callable[..., Loaded]) -> Callable[..., Any]:
    """``load_model(layout)`` returns Parallel Loader's MODEL."""

    def run(layout: str, devices: str = "0,1") -> Any:
        return load_remote(ParallelLayout.parse(layout), name=f"diffusion_models/{file.name}", devices=devices).model

    return run


def prompt(seed: int, batch: int = 1, tokens: int = 7) -> list[Any]:
    random = seeded(seed)
    return [[random(batch, tokens, 32), {"pooled_output": random(batch, 24)}]]


class VAE:
    """Encodes frames into random numbers that follow from their mean, with HunyuanVideo's shapes."""

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        frames, height, width, _ = pixels.shape
        random = seeded(int(pixels.mean() * 1000))
        return random(1, 16, (frames - 1) // 4 + 1, height // 8, width // 8)


def image(seed: int, frames: int = 1) -> torch.Tensor:
    return torch.rand(frames, 60, 50, 3, generator=torch.Generator().manual_seed(seed))


def video(batch: int = 1, **frames: Any) -> dict[str, Any]:
    """Return what the node for given frames gives to a sampler."""
    positive, negative, latent = ParallelOpenSora2Video.execute(
        prompt(1, batch), prompt(2, tokens=5), VAE(), batch_size=batch, **SIZE, **frames
    ).args
    return {"positive": positive, "negative": negative, "latent": latent}


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "text": lambda: video(batch=2),
    "first": lambda: video(start=image(1)),
    "last": lambda: video(end=image(2)),
    "both": lambda: video(batch=2, start=image(1), end=image(2)),
    "clip": lambda: video(start=image(3, frames=9)),
}
LAYOUTS = ("ulysses=2", "cfg=2", "ring=2", "tensor=2", "pipe=2 patches=1")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.daily(1)
def test_ranks_give_what_one_process_gives(kind: str, file: Path, load_model: Callable[..., Any]) -> None:
    given = KINDS[kind]()
    latent, options = given.pop("latent"), {**given, "cfg": 5.0}
    whole = open_sora2.without_backend(file)
    reference = ksampler(whole, latent, **options)
    for other in ({"cfg": 1.0}, {"positive": given["negative"]}):
        assert relative_error(ksampler(whole, latent, **options | other), reference) > 0.01
    places = list(KINDS).index(kind)
    for layout in (LAYOUTS[places], LAYOUTS[(places + 1) % len(LAYOUTS)]):
        model = load_model(layout)
        for sample in (ksampler, parallel_sampler):
            error = relative_error(sample(model, latent, **options), reference)
            assert error < CLOSE, f"{sample.__name__}, {layout}: {error:.1e}"


@pytest.mark.newest
def test_an_image_is_made_without_given_frames(file: Path, load_model: Callable[..., Any]) -> None:
    latent = EmptyHunyuanLatentVideo.execute(72, 80, 1).args[0]
    options = {"positive": prompt(1), "negative": prompt(2)}
    reference = ksampler(open_sora2.without_backend(file), latent, **options)
    assert relative_error(parallel_sampler(load_model("ulysses=2"), latent, **options), reference) < CLOSE


@pytest.mark.parametrize("layout", ["tensor=2", pytest.param("ulysses=2 shard_weights", marks=pytest.mark.newest)])
@pytest.mark.daily(1)
def test_loras_equal_comfyui(layout: str, file: Path, load_model: Callable[..., Any]) -> None:
    given = video(start=image(1))
    latent = given.pop("latent")
    whole = open_sora2.without_backend(file)
    changes = [
        (loras.plain(whole, dialect, rank=4, seed=seed, alpha=3.0), strength)
        for dialect, seed, strength in (("diffusion_model.", 1, 0.7), ("lora_unet_", 2, -0.4))
    ]
    unchanged = ksampler(whole, latent, **given)
    reference = ksampler(loras.on_model(whole, *changes), latent, **given)
    assert relative_error(unchanged, reference) > 100 * CLOSE
    model = loras.on_model(load_model(layout), *changes)
    for sample in (ksampler, parallel_sampler):
        assert relative_error(sample(model, latent, **given), reference) < CLOSE


def guided(model: Any, given: dict[str, Any], steps: int = 3, **options: Any) -> torch.Tensor:
    """Sample with the guider."""
    arguments = {"cfg_text": 5.0, "cfg_frames": 3.0, "oscillation": True, **options}
    guider = ParallelOpenSora2Guider.execute(model, given["positive"], given["negative"], **arguments).args[0]
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", steps)
    latent = given["latent"]["samples"]
    noise = SimpleNamespace(seed=5, generate_noise=lambda latent: seeded(5)(*latent["samples"].shape))
    sampler = comfy.samplers.sampler_object("euler")
    out: torch.Tensor = SamplerCustomAdvanced.execute(noise, guider, sampler, sigmas, {"samples": latent}).args[0][
        "samples"
    ]
    return out


@pytest.mark.newest
@pytest.mark.parametrize(
    ("kind", "layout"), [("both", "cfg=3"), ("first", "ulysses=3"), ("clip", "cfg=3"), ("text", "cfg=2")]
)
def test_the_guider_gives_what_one_process_gives(
    kind: str, layout: str, file: Path, load_model: Callable[..., Any]
) -> None:
    given, whole = KINDS[kind](), open_sora2.without_backend(file)
    reference = guided(whole, given)
    assert relative_error(guided(whole, given, cfg_text=4.0), reference) > 0.01
    assert (relative_error(guided(whole, given, cfg_frames=1.0), reference) > 20 * CLOSE) == (kind != "text")
    model = load_model(layout, devices="0,1,2")
    assert relative_error(guided(model, given), reference) < CLOSE


@pytest.mark.parametrize("layout", ["cfg=3", "cfg=2"])
def test_steps_of_one_branch_take_turns_with_guided_ones(
    layout: str, file: Path, load_model: Callable[..., Any]
) -> None:
    """Steps 12 and 14 are not guided. A rank of ``cfg`` that had work before has none then."""
    given, whole = KINDS["first"](), open_sora2.without_backend(file)
    reference = guided(whole, given, steps=15)
    assert relative_error(guided(whole, given, steps=15, oscillation=False), reference) > 0.01
    model = load_model(layout, devices="0,1,2")
    assert relative_error(guided(model, given, steps=15), reference) < CLOSE


def test_a_guided_step_is_the_formula(file: Path) -> None:
    given, whole = KINDS["first"](), open_sora2.without_backend(file)
    result = guided(whole, given, steps=1)
    calls = whole.model.diffusion_model.inputs
    family = whole.model.diffusion_model._family[0]
    noise = seeded(5)(*given["latent"]["samples"].shape)
    (positive_prompt,), (negative_prompt,) = prompt(1), prompt(2, tokens=5)
    frames = given["positive"][0][1]
    known = 1 - frames["concat_mask"]
    concat = torch.cat([known, frames["concat_latent_image"] * 0.476986], dim=1)

    def velocity(embedding: Any, concat: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = family.stock({
            "hidden_states": noise, "timestep": torch.tensor([1000.0]), "encoder_hidden_states": embedding[0],
            "pooled_projections": embedding[1]["pooled_output"], "concat": concat,
        })  # fmt: skip
        return out

    empty, negative, positive = (
        velocity(negative_prompt, torch.zeros_like(concat)), velocity(negative_prompt, concat),
        velocity(positive_prompt, concat),
    )  # fmt: skip
    ramp = torch.linspace(1.0, 3.0, 5).reshape(1, 1, -1, 1, 1)
    expected = (noise - (empty + ramp * (negative - empty) + 5.0 * (positive - negative))) / 0.476986
    expected[:, :, :1] = frames["concat_latent_image"][:, :, :1]
    assert relative_error(result, expected) < 1e-5
    assert sum(len(call["hidden_states"]) for call in calls) == 3


@pytest.mark.newest
@pytest.mark.parametrize(("kind", "calls"), [("text", 11 * 2 + 1 + 2 + 1), ("first", 11 * 3 + 1 + 3 + 1)])
def test_steps_that_are_not_guided_compute_one_branch(kind: str, calls: int, file: Path) -> None:
    given, whole = video(**({} if kind == "text" else {"start": image(1)})), open_sora2.without_backend(file)
    guided(whole, given, steps=14)
    assert sum(len(call["hidden_states"]) for call in whole.model.diffusion_model.inputs) == calls
    whole.model.diffusion_model.inputs.clear()
    guided(whole, given, steps=14, oscillation=False)
    assert sum(len(call["hidden_states"]) for call in whole.model.diffusion_model.inputs) == 14 * (3 - (kind == "text"))


def test_comfyuis_own_node_gives_first_frames(file: Path) -> None:
    """HunyuanVideo's VAE is causal, so the latent of the first frame is that of an image alone."""
    alone, others, prompts = seeded(8)(1, 16, 1, 10, 9), seeded(9)(1, 16, 4, 10, 9), (prompt(1), prompt(2))
    for_images, for_videos = (
        SimpleNamespace(encode=lambda pixels, latent=latent: latent, spacial_compression_encode=lambda: 8)
        for latent in (alone, torch.cat([alone, others], dim=2))
    )
    theirs = WanImageToVideo.execute(*prompts, for_videos, 72, 80, 17, 1, start_image=image(1)).args
    ours = ParallelOpenSora2Video.execute(*prompts, for_images, **SIZE, batch_size=1, start=image(1)).args
    whole, latent = open_sora2.without_backend(file), {"samples": torch.zeros(1, 16, 5, 10, 9)}
    results = [ksampler(whole, latent, positive=each[0], negative=each[1]) for each in (theirs, ours)]
    assert torch.equal(*results)


def test_the_shift_is_that_of_the_latents_size(file: Path) -> None:
    model, latent = open_sora2.without_backend(file), {"samples": torch.zeros(1, 16, 33, 24, 42)}
    shifted = ParallelOpenSora2Sampling.execute(model, latent).args[0]
    sigmas = comfy.samplers.calculate_sigmas(shifted.get_model_object("model_sampling"), "simple", 50)
    assert (sigmas - torch.tensor(times(50, (33, 24, 42)))).abs().max() < 1e-6
    unshifted = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", 50)
    assert (sigmas - unshifted).abs().max() < 1e-6, "the default is the shift for 129 frames of 336 x 192"
    with pytest.raises(InvalidRequest, match="is no video"):
        ParallelOpenSora2Sampling.execute(model, {"samples": torch.zeros(1, 16, 24, 42)})


def test_a_prompt_gets_its_ends() -> None:
    assert ParallelOpenSora2Prompt.execute("a cat", 24, 4).args[0] == "a cat. 24 FPS. 4 motion score."


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ({"start": image(1, frames=10)}, "start has 10 frames, .* give 9 frames"),
        ({"start": image(1, frames=17)}, "the given frames take 5 latent frames, and the video has 5"),
    ],
)
def test_frames_that_do_not_fit_are_refused(frames: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        video(**frames)


def test_a_latent_of_another_size_is_refused_before_sampling(file: Path) -> None:
    given, whole = video(start=image(1)), open_sora2.without_backend(file)
    given["latent"] = {"samples": torch.zeros(1, 16, 4, 10, 9)}
    with pytest.raises(InvalidRequest, match="are for a latent of 5x10x9, and the sampler's is 4x10x9"):
        guided(whole, given)
    assert not whole.model.diffusion_model.inputs


@pytest.mark.parametrize("sample", [ksampler, parallel_sampler])
def test_a_latent_of_more_or_fewer_frames_is_refused(
    sample: Callable[..., Any], load_model: Callable[..., Any]
) -> None:
    """ComfyUI's own samplers ask for the conditioning when they begin."""
    given = video(start=image(1))
    del given["latent"]
    for frames in (4, 6):
        with pytest.raises(InvalidRequest, match=f"are for a latent of 5 frames, and the sampler's has {frames}"):
            sample(load_model("ulysses=2"), {"samples": torch.zeros(1, 16, frames, 10, 9)}, **given)


def test_a_conditioning_without_pooled_text_is_refused(load_model: Callable[..., Any]) -> None:
    bare = [[prompt(1)[0][0], {}]]
    with pytest.raises(InvalidRequest, match="no pooled output"):
        ksampler(load_model("ulysses=2"), video()["latent"], positive=bare, negative=bare)


def test_the_workflow_gives_what_one_process_gives(file: Path, backend: FreeingClient) -> None:
    """With tiny text and without a VAE: the ranks' latents against one process's."""
    new_session(backend)
    prompt_of = workflows.api("Open-Sora 2.0, text to video")
    cut = {"VAELoader": "vae", "DualCLIPLoader": "clip", "T5TokenizerOptions": "clip", "ParallelVAE": "vae"}
    kept: Prompt = {}
    for key, node in prompt_of.items():
        kind, inputs = node["class_type"], {**node["inputs"]}
        if kind in cut or kind == "CLIPTextEncode":
            kind, inputs = "Given", {"key": cut.get(kind) or ("text" if inputs["text"] else "no text")}
        inputs |= {name: value for name, value in (SIZE | {"steps": 3}).items() if name in inputs}
        if kind not in ("ParallelVAEDecode", "CreateVideo", "SaveVideo"):
            kept[key] = {"class_type": kind, "inputs": inputs}
    (sampler,) = (key for key, node in kept.items() if node["class_type"] == "SamplerCustomAdvanced")
    kept["latent"] = {"class_type": "Recorder", "inputs": {"value": [sampler, 0]}}
    Given.values = {"vae": VAE(), "clip": None, "text": prompt(1), "no text": prompt(2)}
    Given.values["model"] = open_sora2.without_backend(file)
    executor = Executor(*NODES)
    (latent,) = executor.run(kept)
    (loader,) = (key for key, node in kept.items() if node["class_type"] == "ParallelLoader")
    (reference,) = executor.run(kept | {loader: {"class_type": "Given", "inputs": {"key": "model"}}})
    assert reference["samples"].shape == (1, 16, 5, 10, 9)
    assert reference["samples"].std() > 0.01
    assert relative_error(latent["samples"], reference["samples"]) < CLOSE


@pytest.mark.newest
@pytest.mark.parametrize(
    ("kind", "layout"), [("scaled", "tensor=2"), ("described", "ulysses=2"), ("gguf", "ulysses=2 shard_weights")]
)
def test_compressed_files_equal_their_decoded_weights(
    kind: str, layout: str, file: Path, load_remote: Callable[..., Loaded]
) -> None:
    weights, compressed = load_file(file), file.with_name(f"{kind}.{'gguf' if kind == 'gguf' else 'safetensors'}")
    if kind == "gguf":
        decoded = compressed_files.write_gguf(compressed, weights, "Q8_0", "Q4_0", architecture="flux")
    elif kind == "scaled":
        decoded = compressed_files.write_scaled(compressed, weights)
    else:
        decoded = compressed_files.write_described(compressed, weights, "fp8 e4m3", "int8 by row")
    given = video(start=image(1))
    latent = given.pop("latent")
    reference = ksampler(open_sora2.without_backend(file, decoded), latent, **given)
    assert relative_error(ksampler(open_sora2.without_backend(file), latent, **given), reference) > 10 * CLOSE
    model = load_remote(ParallelLayout.parse(layout), name=f"diffusion_models/{compressed.name}").model
    assert relative_error(ksampler(model, latent, **given), reference) < CLOSE


def test_parallel_model_takes_the_place_of_comfyuis_loader(file: Path, backend: FreeingClient) -> None:
    """ComfyUI's loader cannot read the file, and does not run: its node names it."""
    new_session(backend)
    given = video()
    Given.values = {"positive": given["positive"], "negative": given["negative"], "latent": given["latent"]}
    prompt_of: Prompt = {
        "1": {"class_type": "UNETLoader", "inputs": {"unet_name": file.name, "weight_dtype": "default"}},
        "2": {"class_type": "ParallelModel", "inputs": {"model": ["1", 0], "devices": "0,1"}},
        **{name: {"class_type": "Given", "inputs": {"key": name}} for name in Given.values},
        "3": {"class_type": "KSampler", "inputs": {
            "model": ["2", 0], "seed": 5, "steps": 3, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple",
            "positive": ["positive", 0], "negative": ["negative", 0], "latent_image": ["latent", 0], "denoise": 1.0,
        }},
        "4": {"class_type": "Recorder", "inputs": {"value": ["3", 0]}},
    }  # fmt: skip
    (latent,) = Executor(*NODES, ParallelModel).run(prompt_of)
    reference = ksampler(open_sora2.without_backend(file), given.pop("latent"), **given)
    assert relative_error(latent["samples"], reference) < CLOSE
