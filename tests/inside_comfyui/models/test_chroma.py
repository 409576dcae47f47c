"""Chroma: guidance that is not 0, every dialect of LoRAs, and the nodes of ComfyUI's own template."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.sd
import folder_paths
import pytest
from any_folder_name.nodes.backend import session
from any_folder_name.nodes.loader import ParallelLoader
from any_folder_name.nodes.model import ParallelModel
from any_folder_name.parallel_backend.client.client import Client
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from comfy_extras import nodes_custom_sampler, nodes_sd3
from helpers import loras
from helpers.executor import Executor, Given, Prompt
from helpers.inside_fixtures import Loaded, ksampler, parallel_sampler, relative_error
from natives import CASES
from natives.files import FILE_CASES
from safetensors.torch import save_file

CASE, CLOSE = CASES["chroma guided"], 1e-4
FILE = "Chroma1-HD.safetensors"
NODES = (
    ParallelLoader, ParallelModel, nodes_sd3.EmptySD3LatentImage, nodes_custom_sampler.RandomNoise,
    nodes_custom_sampler.BasicScheduler, nodes_custom_sampler.CFGGuider, nodes_custom_sampler.KSamplerSelect,
    nodes_custom_sampler.SamplerCustomAdvanced,
)  # fmt: skip


def test_guidance_changes_the_picture_as_in_comfyui(load_case: Callable[..., Any]) -> None:
    ((text, extra),) = CASE.conditioning(1)
    model, native = load_case("chroma guided", ParallelLayout(ulysses=2)), CASE.native()
    found = []
    for guidance in (0.0, 2.5):
        options = {"positive": [[text, {**extra, "guidance": guidance}]], "negative": CASE.conditioning(2), "cfg": 3.0}
        found.append(ksampler(native, CASE.samples(), **options))
        assert relative_error(parallel_sampler(model, CASE.samples(), **options), found[-1]) < CLOSE
    assert relative_error(*found) > 100 * CLOSE


@pytest.mark.parametrize("dialect", range(len(loras.targets(CASE.native()))))
@pytest.mark.daily(2)
def test_a_lora_in_each_dialect_equals_comfyui(dialect: int, load_case: Callable[..., Any]) -> None:
    native, latent, options = CASE.native(), CASE.samples(), loras.options_of(CASE)
    change = (loras.plain(native, sorted(loras.targets(native))[dialect], rank=3, seed=1, alpha=2.0), 0.6)
    unchanged = ksampler(CASE.native(), latent, **options)
    reference = ksampler(loras.on_model(native, change), latent, **options)
    assert relative_error(unchanged, reference) > 100 * CLOSE
    for layout in ("tensor=2", "ulysses=2 shard_weights"):
        remote = loras.on_model(load_case("chroma guided", ParallelLayout.parse(layout)), change)
        assert relative_error(ksampler(remote, latent, **options), reference) < CLOSE


def template(model: str, **changes: Any) -> Prompt:
    """Return the nodes of ComfyUI's template *Chroma text to image*, but for text encoders and the VAE."""

    def node(kind: str, **inputs: Any) -> dict[str, Any]:
        return {"class_type": kind, "inputs": inputs}

    return {
        "701": node("ModelSamplingAuraFlow", model=[model, 0], shift=1.0),
        "694": node("CFGGuider", model=["701", 0], positive=["748", 0], negative=["749", 0], cfg=3.5),
        "748": node("Given", key="text"),
        "749": node("Given", key="other text"),
        "700": node("KSamplerSelect", sampler_name="euler"),
        "718": node("RandomNoise", noise_seed=68346347456896),
        "734": node("BasicScheduler", model=["701", 0], scheduler="beta", steps=4, denoise=1.0),
        "737": node("EmptySD3LatentImage", width=72, height=88, batch_size=2),
        "747": node("SamplerCustomAdvanced", noise=["718", 0], guider=["694", 0], sampler=["700", 0],
                    sigmas=["734", 0], latent_image=["737", 0]),
        "latent": node("Recorder", value=["747", 0]),
        "731": node("UNETLoader", unet_name=FILE, weight_dtype="default"),
        "parallel": node("ParallelModel", model=["731", 0], devices="all", attention="auto"),
        "loader": node("ParallelLoader", model_name=f"diffusion_models/{FILE}", dtype="auto", devices="all",
                       attention="auto"),
        "alone": node("Given", key="model"),
        **changes,
    }  # fmt: skip


@pytest.mark.parametrize("door", ["parallel", "loader"])
def test_comfyuis_template_gives_the_latents_that_comfyui_alone_gives(
    door: str, backend: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = FILE_CASES["chroma guided"]
    native = case.native()
    weights = native.model.diffusion_model.state_dict()
    save_file({name: tensor.clone().contiguous() for name, tensor in weights.items()}, tmp_path / FILE)
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "diffusion_models", ([str(tmp_path)], {".safetensors"}))
    folder_paths.filename_list_cache.clear()
    session.current().client = backend
    monkeypatch.setattr(comfy.sd, "load_diffusion_model", lambda *_, **__: pytest.fail("ComfyUI reads the file"))
    Given.values = {"text": case.conditioning(1), "other text": case.conditioning(2, shorter=3), "model": native}
    (latent,) = Executor(*NODES).run(template(door))
    (reference,) = Executor(*NODES).run(template("alone"))
    assert reference["samples"].std() > 0.01
    assert relative_error(latent["samples"], reference["samples"]) < CLOSE


@pytest.mark.parametrize("naming", ["comfyui", "diffusers"])
def test_a_file_in_either_naming_equals_comfyui(naming: str, folder: Path, load_remote: Callable[..., Loaded]) -> None:
    case = FILE_CASES["chroma guided"]
    native, options = case.native(), loras.options_of(case)
    weights = {name: tensor.clone() for name, tensor in native.model.diffusion_model.state_dict().items()}
    weights = case.converted(weights) if naming == "diffusers" else weights
    save_file(weights, folder / f"{naming}.safetensors")
    model = load_remote(ParallelLayout(tensor=2), name=f"diffusion_models/{naming}.safetensors").model
    reference = ksampler(native, case.samples(), **options)
    assert relative_error(parallel_sampler(model, case.samples(), **options), reference) < CLOSE
