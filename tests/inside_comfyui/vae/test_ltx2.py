"""The VAEs of LTX-2 and 2.3 against ComfyUI's own: on ranks, in tiles, and before the latent upsampler."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comfy.model_patcher
import comfy.nested_tensor
import comfy.ops
import comfy.sd
import folder_paths
import pytest
import torch
from any_folder_name.nodes.loader import open_vae
from any_folder_name.nodes.remote.adopt import copy_vae
from any_folder_name.nodes.remote.vae import RemoteVAE, vae_alone
from any_folder_name.nodes.vae import ParallelVAE, ParallelVAEDecode, ParallelVAEEncode
from any_folder_name.parallel_backend.checkpoint.opening import open_checkpoint
from any_folder_name.parallel_backend.client.client import Client
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.loading.load import load_vae
from any_folder_name.parallel_backend.vaes import vae_of
from comfy.ldm.lightricks.vae import causal_video_autoencoder as lightricks
from helpers import dynamic_vram
from helpers.engine_client import EngineClient
from helpers.executor import Executor, Given, Prompt
from helpers.inside_fixtures import new_session, relative_error
from helpers.native_vaes import Weights, randomize
from natives import CASES
from safetensors.torch import save_file

import nodes as core_nodes

pytestmark = pytest.mark.skipif("ltx2 2.3" not in CASES, reason="this version of ComfyUI has no LTX-2.3")

_ONE = ["res_x", {"num_layers": 1}]
_DOWN = [
    block for kind in ("space", "time", "all", "all") for block in (_ONE, [f"compress_{kind}_res", {"multiplier": 2}])
]
_UP = {
    "2": [("all", {"residual": True, "multiplier": 2})] * 3,
    "2.3": [(kind, {"multiplier": factor}) for kind, factor in (("space", 2), ("time", 2), ("all", 1), ("all", 2))],
}
"""The upsamplings of each version, the finest first."""
VERSIONS = list(_UP)


def config(version: str) -> dict[str, Any]:
    """Return what a file's metadata says of a VAE."""
    up = [block for kind, options in _UP[version] for block in (_ONE, [f"compress_{kind}", options])]
    padding = {"spatial_padding_mode": "zeros"} if version == "2.3" else {}
    return {
        "_class_name": "CausalVideoAutoencoder", "dims": 3, "in_channels": 3, "out_channels": 3, "latent_channels": 128,
        "encoder_blocks": [*_DOWN, _ONE], "decoder_blocks": [*up, _ONE], "norm_layer": "pixel_norm", "patch_size": 4,
        "latent_log_var": "uniform", "causal_decoder": False, "timestep_conditioning": False,
        "encoder_base_channels": 8, "decoder_base_channels": 8, **padding,
    }  # fmt: skip


@dynamic_vram.off()
def weights(version: str) -> Weights:
    """Return random weights by the published names."""
    found: Weights = randomize(lightricks.VideoVAE(config=config(version))).state_dict()
    return {name: tensor.clone().contiguous() for name, tensor in found.items()}


Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """``write(version)`` writes a file into the folder of VAEs."""
    before = folder_paths.folder_names_and_paths["vae"][0][:]
    folder_paths.folder_names_and_paths["vae"][0][:] = [str(tmp_path)]

    def create(version: str) -> Path:
        path = tmp_path / f"ltx-{version}.safetensors"
        save_file(weights(version), path, {"config": json.dumps({"vae": config(version)})})
        folder_paths.filename_list_cache.clear()
        return path

    yield create
    folder_paths.folder_names_and_paths["vae"][0][:] = before
    folder_paths.filename_list_cache.clear()


def random(*shape: int) -> torch.Tensor:
    """Return random numbers, always the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def prompt(file: Path, vae: str, devices: str, tile: int | None = None) -> Prompt:
    """Return a prompt that decodes a latent and encodes a video, by our nodes in tiles or by ComfyUI's."""
    ours, tiles = ("", {}) if tile is None else ("Parallel", {"tile": tile})
    return {
        "1": {"class_type": "VAELoader", "inputs": {"vae_name": file.name}},
        "2": {"class_type": "ParallelVAE", "inputs": {"vae": ["1", 0], "devices": devices}},
        "3": {"class_type": "Given", "inputs": {"key": "latent"}},
        "4": {"class_type": f"{ours}VAEDecode", "inputs": {"samples": ["3", 0], "vae": [vae, 0], **tiles}},
        "5": {"class_type": "Given", "inputs": {"key": "image"}},
        "6": {"class_type": f"{ours}VAEEncode", "inputs": {"pixels": ["5", 0], "vae": [vae, 0], **tiles}},
        "7": {"class_type": "Recorder", "inputs": {"value": ["4", 0]}},
        "8": {"class_type": "Recorder", "inputs": {"value": ["6", 0]}},
    }


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.daily(1)
def test_ranks_give_the_pixels_and_latents_of_the_bypassed_workflow(
    write: Write, backend: Client, version: str
) -> None:
    """The latent has sound beside the picture, and rows that no number of ranks divides."""
    file = write(version)
    new_session(backend)
    executor = Executor(ParallelVAE, ParallelVAEDecode, ParallelVAEEncode)
    nested = comfy.nested_tensor.NestedTensor((random(1, 128, 2, 7, 3), random(1, 8, 9, 16)))
    Given.values = {"latent": {"samples": nested}, "image": random(9, 7 * 32 + 5, 96, 3).sigmoid()}
    reference = executor.run(prompt(file, "1", "0"))
    assert reference[0].shape == (9, 7 * 32, 96, 3)
    assert min(reference[0].std(), reference[1]["samples"].std()) > 0.1
    for devices, tile in (("0,1,2", None), ("0,1", 0), ("0", None)):  # fewer start no ranks
        pixels, latent = executor.run(prompt(file, "2", devices, tile))
        assert executor.texts["2"] == [f"{file.name}: ComfyUI does not load it"]
        assert pixels.shape == reference[0].shape
        assert relative_error(pixels, reference[0]) < 1e-4
        assert relative_error(latent["samples"], reference[1]["samples"]) < 1e-4


def test_tiles_are_the_same_on_any_number_of_ranks(write: Write, backend: Client) -> None:
    file = write("2.3")
    new_session(backend)
    executor = Executor(ParallelVAE, ParallelVAEDecode, ParallelVAEEncode)
    Given.values = {"latent": {"samples": random(1, 128, 2, 9, 11)}, "image": random(9, 288, 352, 3).sigmoid()}
    results = [executor.run(prompt(file, "2", devices, 256)) for devices in ("0,1,2", "0,1", "0")]
    whole = executor.run(prompt(file, "2", "0", 0))
    assert relative_error(results[0][0], whole[0]) > 1e-4
    for pixels, latent in results[1:]:
        assert relative_error(pixels, results[0][0]) < 1e-4
        assert relative_error(latent["samples"], results[0][1]["samples"]) < 1e-4


@pytest.fixture
def both(write: Write) -> Callable[[str], tuple[Any, RemoteVAE]]:
    """Return ComfyUI's VAE of a file, and ours."""
    new_session(EngineClient())

    def load(version: str) -> tuple[Any, RemoteVAE]:
        file = write(version)
        metadata = {"config": json.dumps({"vae": config(version)})}
        handle = open_vae(file, "0", "1")
        ours = vae_alone(handle, vae_of(handle.checkpoint).scale, "float32")
        return comfy.sd.VAE(sd=weights(version), metadata=metadata, dtype=torch.float32), ours

    return load


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("frames", [1, 2, 4])
def test_numbers_of_frames_and_the_tiled_nodes_equal_comfyui(both: Any, version: str, frames: int) -> None:
    native, vae = both(version)
    latent = random(1, 128, frames, 3, 2)
    pixels = random(8 * frames - 7, 96, 64, 3).sigmoid()
    decoded, encoded = native.decode(latent), native.encode(pixels)
    assert relative_error(vae.decode(latent), decoded) < 1e-4
    assert relative_error(vae.encode(pixels), encoded) < 1e-4
    tiled = core_nodes.VAEDecodeTiled().decode(vae, {"samples": latent}, 512, 64)[0]
    assert relative_error(tiled, decoded.flatten(0, 1)) < 1e-4
    ratios = ("upscale_index_formula", "downscale_index_formula", "latent_channels")
    assert [getattr(vae, name) for name in ratios] == [getattr(native, name) for name in ratios]


def test_a_copy_of_loaded_weights_is_the_same_vae(both: Any) -> None:
    native, _ = both("2.3")
    copied = copy_vae(native)
    copied.fill()
    checkpoint = open_checkpoint(copied.path)
    written = checkpoint.config("vae")
    assert written["upsample_type"] == ["spatial", "temporal", "spatiotemporal", "spatiotemporal"]
    assert written["upsample_residual"] == [False] * 4
    frames: list[torch.Tensor] = []
    latent = random(1, 128, 2, 3, 2)
    vae_of(checkpoint).decode(load_vae(checkpoint, torch.device("cpu")), latent, frames.append, lambda: None)
    decoded = ((torch.cat(frames, dim=2) + 1) / 2).clamp(0, 1).movedim(1, -1)
    assert relative_error(decoded, native.decode(latent)) < 1e-4


@dynamic_vram.off()
def upsampler() -> Any:
    """Return a small latent upsampler."""
    from comfy.ldm.lightricks.latent_upsampler import LatentUpsampler

    small = {"mid_channels": 32, "num_blocks_per_stage": 1}
    module = randomize(LatentUpsampler(comfy.ops.manual_cast, **small))
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(module, load_device=cpu, offload_device=cpu)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_latent_upsampler_takes_the_statistics(both: Any, version: str) -> None:
    from comfy_extras.nodes_lt_upsampler import LTXVLatentUpsampler

    model, latent = upsampler(), {"samples": random(1, 128, 2, 3, 2)}
    expected, ours = (LTXVLatentUpsampler.execute(latent, model, vae).args[0]["samples"] for vae in both(version))
    assert expected.shape == (1, 128, 2, 6, 4)
    assert torch.equal(ours, expected)


def test_what_comfyui_has_to_run_is_refused_by_name(tmp_path: Path) -> None:
    for name, message in (("decoder.conv_in_x_t", "LTX-2.5's VAE"), ("vocoder.conv_pre", "LTX-2's VAE of sound")):
        file = tmp_path / "vae.safetensors"
        save_file({f"{name}.weight": torch.zeros(8, 8), "encoder.conv_in.conv.weight": torch.zeros(8, 8)}, file)
        with pytest.raises(InvalidRequest, match=f"{message}.*ComfyUI itself runs it"):
            open_vae(file, "0", "1")
