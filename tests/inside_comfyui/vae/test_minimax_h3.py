"""MiniMax-H3's video VAE against ComfyUI's own: its clips, its blended tiles, and the sound that ComfyUI decodes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comfy.nested_tensor
import comfy.sd
import comfy.utils
import folder_paths
import pytest
import torch
from any_folder_name.nodes.backend import session
from any_folder_name.nodes.bridges.compute_dtype import auto_vae_dtype
from any_folder_name.nodes.loader import open_vae
from any_folder_name.nodes.remote.adopt import copy_vae
from any_folder_name.nodes.remote.vae import RemoteVAE, vae_alone
from any_folder_name.nodes.vae import ParallelVAE, ParallelVAEDecode, ParallelVAEEncode
from any_folder_name.parallel_backend.checkpoint.opening import open_checkpoint
from any_folder_name.parallel_backend.client.client import Client
from any_folder_name.parallel_backend.errors import InvalidRequest, OutOfMemory
from any_folder_name.parallel_backend.loading.load import load_vae
from any_folder_name.parallel_backend.protocol.model_spec import Devices
from any_folder_name.parallel_backend.vaes import vae_of
from any_folder_name.parallel_backend.vaes.minimax_h3 import MiniMaxH3
from helpers import compressed_files, minimax_h3_vae
from helpers.engine_client import EngineClient
from helpers.executor import Executor, Given, Prompt
from helpers.inside_fixtures import new_session, relative_error
from helpers.minimax_h3_vae import core, weights
from safetensors.torch import save_file

import nodes as core_nodes

needs_core = pytest.mark.skipif(core is None, reason="this version of ComfyUI has no MiniMax-H3")
SMALL = {"tile_size": 64, "tile_overlap_min": 16}
NAME = "minimax_h3_video_vae_fp16.safetensors"


@pytest.fixture(name="narrow")
def narrow_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ComfyUI build a narrow VAE."""
    minimax_h3_vae.narrow(monkeypatch)


@pytest.fixture
def small_tiles(narrow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ComfyUI's tiles and those of ranks in this process be small."""
    minimax_h3_vae.other_defaults(monkeypatch, core.MiniMaxH3VideoVAE.__init__, **SMALL)
    monkeypatch.setattr(MiniMaxH3, "own_tile", SMALL["tile_size"])
    monkeypatch.setattr(MiniMaxH3, "own_overlap", SMALL["tile_overlap_min"])


@pytest.fixture
def file(narrow: None, tmp_path: Path) -> Iterator[Path]:
    """A file in the folder of VAEs."""
    before = folder_paths.folder_names_and_paths["vae"][0][:]
    folder_paths.folder_names_and_paths["vae"][0][:] = [str(tmp_path)]
    folder_paths.filename_list_cache.clear()
    save_file(weights(), tmp_path / NAME)
    yield tmp_path / NAME
    folder_paths.folder_names_and_paths["vae"][0][:] = before
    folder_paths.filename_list_cache.clear()


def random(*shape: int) -> torch.Tensor:
    """Return random numbers, always the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def nested(video: torch.Tensor) -> Any:
    """Return the latent of a video with sound."""
    return comfy.nested_tensor.NestedTensor((video, random(1, 32, 2, 37)))


def prompt(vae: str, devices: str, nodes: tuple[str, str] = ("VAEDecode", "VAEEncode")) -> Prompt:
    """Return a prompt that decodes a latent and encodes an image."""
    return {
        "1": {"class_type": "VAELoader", "inputs": {"vae_name": NAME}},
        "2": {"class_type": "ParallelVAE", "inputs": {"vae": ["1", 0], "devices": devices}},
        "3": {"class_type": "Given", "inputs": {"key": "latent"}},
        "4": {"class_type": nodes[0], "inputs": {"samples": ["3", 0], "vae": [vae, 0]}},
        "5": {"class_type": "Given", "inputs": {"key": "image"}},
        "6": {"class_type": nodes[1], "inputs": {"pixels": ["5", 0], "vae": [vae, 0]}},
        "7": {"class_type": "Recorder", "inputs": {"value": ["4", 0]}},
        "8": {"class_type": "Recorder", "inputs": {"value": ["6", 0]}},
    }


@needs_core
def test_ranks_give_the_pixels_and_latents_of_the_bypassed_workflow(file: Path, backend: Client) -> None:
    """The latent has two clips of two by three tiles, some of them for nobody in the last round of three ranks."""
    new_session(backend)
    executor = Executor(ParallelVAE, ParallelVAEDecode, ParallelVAEEncode)
    Given.values = {"latent": {"samples": nested(random(1, 24, 12, 17, 30))}, "image": random(1, 275, 480, 3).sigmoid()}
    reference = executor.run(prompt("1", "0"))
    assert reference[0].shape == (39, 272, 480, 3)
    assert reference[0].std() > 0.1
    assert reference[1]["samples"].std() > 0.1
    parallel = ("ParallelVAEDecode", "ParallelVAEEncode")
    for devices, nodes in (("0,1,2", parallel), ("0,1", ("VAEDecode", "VAEEncode")), ("0", parallel)):
        pixels, latent = executor.run(prompt("2", devices, nodes))
        assert executor.texts["2"] == [f"{NAME}: ComfyUI does not load it"]
        assert pixels.shape == reference[0].shape
        assert relative_error(pixels, reference[0]) < 1e-4
        assert relative_error(latent["samples"], reference[1]["samples"]) < 1e-4


@pytest.fixture
def both(small_tiles: None, file: Path) -> Callable[..., tuple[Any, RemoteVAE]]:
    """Return ComfyUI's VAE of the file, and ours."""
    new_session(EngineClient())

    def load(dtype: torch.dtype = torch.float32) -> tuple[Any, RemoteVAE]:
        held = comfy.utils.load_torch_file(str(file))
        native = comfy.sd.VAE(sd={name: each.to(dtype) for name, each in held.items()}, dtype=dtype)
        handle = open_vae(file, "0", "1")
        name: Any = str(dtype).removeprefix("torch.")
        return native, vae_alone(handle, vae_of(handle.checkpoint).scale, name)

    return load


@needs_core
@pytest.mark.parametrize("frames", [1, 2, 3, 5, 6, 7, 9, 12])
@pytest.mark.daily(3)
def test_decode_equals_comfyui(both: Any, frames: int) -> None:
    native, vae = both()
    latent = random(1, 24, frames, 9, 7)
    expected = native.decode(latent)
    assert expected.std() > 0.1
    for pixels in (vae.decode(latent), vae.decode_tiled(latent, tile_x=16), vae.decode(latent.half())):
        assert pixels.shape == expected.shape
    assert relative_error(vae.decode(latent), expected) < 1e-4
    (tiled,) = core_nodes.VAEDecodeTiled().decode(vae, {"samples": nested(latent)}, 512, 64, 64, 8)
    assert relative_error(tiled, native.decode_tiled(latent).flatten(0, 1)) < 1e-4


@needs_core
@pytest.mark.parametrize("frames", [1, 2, 5, 18, 22])
@pytest.mark.daily(2)
def test_encode_equals_comfyui(both: Any, frames: int) -> None:
    native, vae = both()
    pixels = random(frames, 83, 64 + 48, 4).sigmoid()
    expected = native.encode(pixels)
    assert expected.std() > 0.1
    for latent in (vae.encode(pixels), vae.encode_tiled(pixels, tile_x=512)):
        assert latent.shape == expected.shape
        assert relative_error(latent, expected) < 1e-4


@needs_core
@pytest.mark.parametrize("encode", [False, True], ids=["decode", "encode"])
@pytest.mark.daily(1)
def test_half_precision_is_as_near_to_float32_as_comfyuis(both: Any, encode: bool) -> None:
    (exact, _), (half, vae) = both(), both(torch.float16)
    given = random(5, 64, 80, 3).sigmoid() if encode else random(1, 24, 3, 5, 4)
    results = [each.encode(given) if encode else each.decode(given) for each in (exact, half, vae)]
    own = relative_error(results[1], results[0])
    assert own / 4 < relative_error(results[2], results[0]) < 2 * own


@needs_core
def test_a_vae_from_elsewhere_is_copied_bit_for_bit(both: Any, file: Path) -> None:
    native, _ = both()
    copied = copy_vae(native)
    checkpoint = open_checkpoint(copied.path)
    copied.fill()
    cpu = torch.device("cpu")
    ours, expected = (load_vae(each, cpu).state_dict() for each in (checkpoint, open_checkpoint(file)))
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in expected.items())


@needs_core
def test_a_file_without_statistics_has_the_published_ones(both: Any, file: Path) -> None:
    save_file({name: each for name, each in weights().items() if not name.startswith("latents_")}, file)
    native, vae = both()
    latent = random(1, 24, 2, 3, 3)
    assert relative_error(vae.decode(latent), native.decode(latent)) < 1e-4


@needs_core
def test_int8_weights_are_decoded(both: Any, file: Path) -> None:
    """ComfyUI computes with rounded activations where it reads such a file, so it gets what the numbers stand for."""
    decoded = compressed_files.write_described(file, weights(), "int8 rotated")
    assert not torch.equal(decoded["decoder.proj_out.weight"], weights()["decoder.proj_out.weight"])
    native = comfy.sd.VAE(sd=decoded, dtype=torch.float32)
    handle = open_vae(file, "0", "1")
    vae, latent = vae_alone(handle, vae_of(handle.checkpoint).scale, "float32"), random(1, 24, 3, 5, 4)
    assert relative_error(vae.decode(latent), native.decode(latent)) < 1e-4


@needs_core
def test_nodes_read_the_same_from_both(both: Any) -> None:
    native, vae = both()
    same = (
        "latent_channels", "latent_dim", "output_channels", "upscale_index_formula", "downscale_index_formula",
    )  # fmt: skip
    assert [getattr(vae, name) for name in same] == [getattr(native, name) for name in same]
    for ratio in ("upscale_ratio", "downscale_ratio"):
        ours, theirs = getattr(vae, ratio), getattr(native, ratio)
        assert [ours[0](frames) for frames in range(130)] == [theirs[0](frames) for frames in range(130)]
        assert ours[1:] == theirs[1:]
    assert vae.temporal_compression_decode() == native.temporal_compression_decode()
    checkpoint = vae.handle.checkpoint
    assert native.working_dtypes == [*vae_of(checkpoint).working_dtypes, torch.float32]
    assert auto_vae_dtype(vae_of(checkpoint), Devices(kind="cpu", indices=(0,))) == "float32"


@needs_core
def test_progress_counts_tiles(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, vae = both()
    updates: list[tuple[int, int]] = []
    monkeypatch.setattr(comfy.utils, "PROGRESS_THROTTLE_MIN_INTERVAL", 0.0, raising=False)
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", lambda value, total, *_, **__: updates.append((value, total)))
    vae.decode(random(1, 24, 7, 9, 6))
    assert updates[-1] == (6, 6)


@needs_core
def test_out_of_memory_no_other_tiles_are_tried(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, vae = both()
    asked: list[int] = []

    def full(message: Any, *args: Any, **options: Any) -> Any:
        asked.append(message.tile)
        raise OutOfMemory("rank 0 is out of memory")

    monkeypatch.setattr(session.current().client, "attempt", full)
    with pytest.raises(comfy.model_management.OOM_EXCEPTION, match="rank 0 is out of memory"):
        vae.decode(random(1, 24, 2, 40, 40))
    assert asked == [0]


@needs_core
def test_a_tile_of_the_users_is_refused(both: Any) -> None:
    _, vae = both()
    with pytest.raises(InvalidRequest, match="tile 512: this VAE works in tiles of its own, of 64 pixels"):
        ParallelVAEDecode.execute({"samples": random(1, 24, 2, 3, 3)}, vae, 512)


def test_a_vae_of_sound_is_left_to_comfyui(tmp_path: Path) -> None:
    names = ("pre_block.attn.zero_k_bias", "decoder.conv_pre.weight", "encoder.block.0.weight")
    save_file({name: torch.zeros(2, 2) for name in names}, tmp_path / "sound.safetensors")
    with pytest.raises(InvalidRequest, match=r"MiniMax-H3's VAE of sound .*without Parallel VAE behind it"):
        open_vae(tmp_path / "sound.safetensors", "0", "1")


@pytest.mark.skipif(core is not None, reason="this version of ComfyUI has MiniMax-H3")
def test_older_versions_say_which_ones_have_it(tmp_path: Path) -> None:
    from any_folder_name.parallel_backend.vaes import module_class_of

    config = {"block_out_channels": [32] * 6, "decoder_num_layers": 1, "decoder_num_attention_heads": 1}
    module = module_class_of("AutoencoderKLMiniMaxH3")(**config)
    save_file(module.state_dict(), tmp_path / NAME)
    with pytest.raises(InvalidRequest, match=r"has no MiniMax-H3; ComfyUI 0\.30\.0 and newer have it"):
        open_vae(tmp_path / NAME, "0", "1")
