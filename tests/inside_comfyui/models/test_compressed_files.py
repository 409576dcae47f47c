"""Compressed model files in original names: ComfyUI with the decoded weights, and with the file, against the ranks."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import comfy.quant_ops
import comfy.sd
import pytest
import torch
from any_folder_name.nodes.backend import checkpoints
from any_folder_name.nodes.remote.adopt import copy_model
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from helpers import compressed_files
from helpers.executor import Executor, Given, Prompt
from helpers.inside_fixtures import Loaded, ksampler, parallel_sampler, relative_error
from helpers.layout_cover import layouts
from helpers.parallel_model import CASE, latent, prompt
from natives.files import FILE_CASES, metadata
from safetensors.torch import save_file

import nodes

CLOSE, ROUNDED = 1e-4, 0.05
"""Relative differences: of sums in another order, and of 8-bit activations of these small models."""
FAMILIES = (
    "flux dev",
    pytest.param("chroma guided", marks=pytest.mark.newest),
    "wan t2v",
    pytest.param("qwen_image image", marks=pytest.mark.newest),
    pytest.param("z_image image", marks=pytest.mark.newest),
    pytest.param("krea2 image", marks=pytest.mark.newest),
    pytest.param("ltx2 2", marks=pytest.mark.newest),
    pytest.param("minimax_h3 pruned", marks=pytest.mark.newest),
)
"""Fused rows, rows under other names, diffusers' own names, and both."""
BLOCKS = ("Q8_0", "Q4_1", "IQ4_NL", "Q5_0", "Q4_K")
"""Block types of which most fit the rows of tiny models."""


@cache
def native(name: str) -> Any:
    return FILE_CASES[name].native()


@cache
def weights(name: str) -> dict[str, torch.Tensor]:
    return {key: each.clone() for key, each in native(name).model.diffusion_model.state_dict().items()}


def sampled(sample: Callable[..., torch.Tensor], model: Any, case: Any) -> torch.Tensor:
    positive, negative = case.conditioning(1), case.conditioning(2, shorter=case.shorter)
    return sample(case.patch(model), case.samples(), positive=positive, negative=negative, cfg=case.cfg)


@pytest.mark.parametrize("suffix", ["safetensors", "gguf"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.daily(4)
def test_sampling_equals_comfyui_with_the_decoded_weights(
    name: str, suffix: str, folder: Path, load_remote: Callable[..., Loaded]
) -> None:
    file, said = folder / f"{name}.{suffix}", metadata(FILE_CASES[name])
    if suffix == "gguf":
        decoded = compressed_files.write_gguf(file, weights(name), *BLOCKS, said=said)
    else:
        decoded = compressed_files.write_described(file, weights(name), *compressed_files.FORMATS, said=said)
    assert f"diffusion_models/{file.name}" in checkpoints.listed_names()
    reference = native(name)
    reference.model.diffusion_model.load_state_dict(decoded)
    wanted = sampled(ksampler, reference, FILE_CASES[name])
    sample, layout = list(zip((ksampler, parallel_sampler), layouts(name), strict=True))[suffix == "gguf"]
    model = load_remote(layout, name=f"diffusion_models/{file.name}").model
    error = relative_error(sampled(sample, model, FILE_CASES[name]), wanted)
    assert error < CLOSE, f"{sample.__name__}, {layout}: {error:.1e}"


@cache
def small_weights() -> dict[str, torch.Tensor]:
    return {key: each.clone() for key, each in CASE.native().model.diffusion_model.state_dict().items()}


@pytest.mark.parametrize("name", ["fp8 e4m3", "fp8 e5m2", "mxfp8", "nvfp4"])
def test_sampling_equals_comfyui_with_the_file(name: str, folder: Path, load_remote: Callable[..., Loaded]) -> None:
    file = folder / f"{name}.safetensors"
    compressed_files.write_described(file, small_weights(), name, in_metadata=name == "nvfp4")
    assert difference(file, load_remote) < CLOSE


@pytest.mark.newest
def test_comfyui_decodes_rows_of_fp8_as_the_ranks_do() -> None:
    """Its products with such weights fail unless they are square, so there is no picture to compare."""
    weight = torch.randn(256, 128)
    result = compressed_files.FORMATS["fp8 by row"][1](weight)
    scale, layout = result.stored["weight_scale"], "TensorCoreFP8E4M3Layout"
    params = comfy.quant_ops.TensorCoreFP8Layout.Params(scale=scale, orig_dtype=torch.float32, orig_shape=weight.shape)
    native = comfy.quant_ops.QuantizedTensor(result.stored["weight"], layout, params)
    assert torch.equal(native.dequantize(), result.decoded)


def test_sampling_equals_comfyui_with_a_file_in_the_older_dialect(
    folder: Path, load_remote: Callable[..., Loaded]
) -> None:
    file = folder / "scaled.safetensors"
    compressed_files.write_scaled(file, small_weights())
    assert difference(file, load_remote) < CLOSE


def test_scaled_e5m2_is_decoded_as_such(folder: Path, load_remote: Callable[..., Loaded]) -> None:
    """ComfyUI 0.8.0 to 0.33.0 take the older dialect for e4m3, so their picture is another one."""
    file = folder / "scaled e5m2.safetensors"
    decoded = compressed_files.write_scaled(file, small_weights(), torch.float8_e5m2)
    reference = CASE.native()
    reference.model.diffusion_model.load_state_dict(decoded)
    model = load_remote(ParallelLayout.parse("tensor=2"), name=f"diffusion_models/{file.name}").model
    assert relative_error(sampled(ksampler, model, CASE), sampled(ksampler, reference, CASE)) < CLOSE


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "net."])
def test_sampling_equals_comfyui_with_three_dialects_of_fp8_in_a_file(
    prefix: str, folder: Path, load_remote: Callable[..., Loaded]
) -> None:
    file = folder / f"mixed {prefix}.safetensors"
    compressed_files.write_mixed(file, small_weights(), prefix)
    assert difference(file, load_remote) < CLOSE


def test_names_in_gguf_files_may_begin_as_comfyui_takes_them(folder: Path, load_remote: Callable[..., Loaded]) -> None:
    """ComfyUI-GGUF takes the first beginning away, and ComfyUI the others."""
    for number, prefix in enumerate(("model.diffusion_model.", "net.", "model.", "model.model.")):
        file = folder / f"begins {number}.gguf"
        named = {prefix + name: weight for name, weight in small_weights().items()}
        decoded = compressed_files.write_gguf(file, named, *BLOCKS, architecture="sd3")
        reference = CASE.native()
        reference.model.diffusion_model.load_state_dict({name.removeprefix(prefix): decoded[name] for name in decoded})
        model = load_remote(ParallelLayout.parse("ulysses=2"), name=f"diffusion_models/{file.name}").model
        assert relative_error(sampled(ksampler, model, CASE), sampled(ksampler, reference, CASE)) < CLOSE


@pytest.mark.parametrize("name", ["int8", "int8 by row", "int8 rotated"])
def test_comfyui_rounds_what_int8_layers_get_and_cpu_ranks_do_not(
    name: str, folder: Path, load_remote: Callable[..., Loaded]
) -> None:
    file = folder / f"{name} rounded.safetensors"
    compressed_files.write_described(file, small_weights(), name)
    assert CLOSE < difference(file, load_remote) < ROUNDED


def difference(file: Path, load_remote: Callable[..., Loaded]) -> float:
    """Return how much two ranks' result with a file differs from ComfyUI's with it."""
    skip_unknown(file)
    wanted = sampled(ksampler, comfy.sd.load_diffusion_model(str(file)), CASE)
    model = load_remote(ParallelLayout.parse("tensor=2"), name=f"diffusion_models/{file.name}").model
    return relative_error(sampled(ksampler, model, CASE), wanted)


def skip_unknown(file: Path) -> None:
    """Skip a test whose file ComfyUI itself cannot read."""
    formats = {each["format"] for each in compressed_files.described(file).values()}
    if not formats <= comfy.quant_ops.QUANT_ALGOS.keys():
        pytest.skip(f"this ComfyUI does not know {formats}")


class UnetLoaderGGUF:
    """ComfyUI-GGUF's loader, which must not run."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load_unet"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"unet_name": ("STRING", {})}}

    def load_unet(self, unet_name: str) -> None:
        raise AssertionError(unet_name)


def test_parallel_model_follows_the_loader_of_comfyui_gguf(
    executor: Executor, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, "UnetLoaderGGUF", UnetLoaderGGUF)
    decoded = compressed_files.write_gguf(folder / "tiny.gguf", small_weights(), *BLOCKS, architecture="sd3")
    save_file(decoded, folder / "decoded.safetensors")
    plain = {"class_type": "UNETLoader", "inputs": {"unet_name": "decoded.safetensors", "weight_dtype": "default"}}
    loader = {"class_type": "UnetLoaderGGUF", "inputs": {"unet_name": "tiny.gguf"}}
    result = latent(executor.run(prompt("3", **{"1": loader})))
    assert executor.texts["3"] == ["tiny.gguf: ComfyUI does not load it"]
    assert relative_error(result, latent(executor.run(prompt("2", **{"1": plain})))) < CLOSE


@pytest.mark.parametrize(("name", "close"), [("fp8 e4m3", CLOSE), ("nvfp4", CLOSE), ("int8 rotated", ROUNDED)])
def test_a_model_that_comfyui_has_loaded_is_copied_as_it_is(
    name: str, close: float, executor: Executor, folder: Path
) -> None:
    file = folder / f"{name} to copy.safetensors"
    compressed_files.write_described(file, small_weights(), name)
    skip_unknown(file)
    with torch.inference_mode():  # as ComfyUI runs nodes
        native = comfy.sd.load_diffusion_model(str(file))
        copied = copy_model(native)
    assert 0.9 < copied.path.stat().st_size / file.stat().st_size < 1.1
    native.cached_patcher_init = None
    Given.values["model"] = native
    elsewhere: Prompt = {"1": {"class_type": "Given", "inputs": {"key": "model"}}}
    wanted = latent(executor.run(prompt("2", **elsewhere)))
    assert relative_error(latent(executor.run(prompt("3", **elsewhere))), wanted) < close


def test_a_compressed_layer_with_a_patch_is_decoded_before_it_is_added(executor: Executor, folder: Path) -> None:
    file = folder / "patched.safetensors"
    decoded = compressed_files.write_described(file, small_weights(), "nvfp4")
    key = "joint_blocks.0.x_block.mlp.fc1.weight"
    change = 0.3 * torch.randn(decoded[key].shape, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():  # as ComfyUI runs nodes
        patched = comfy.sd.load_diffusion_model(str(file)).clone()
    assert patched.add_patches({f"diffusion_model.{key}": ("diff", (change,))})
    reference = CASE.native()
    reference.model.diffusion_model.load_state_dict(decoded | {key: decoded[key] + change})
    Given.values |= {"model": patched, "reference": reference}
    parallel = latent(executor.run(prompt("3", **{"1": {"class_type": "Given", "inputs": {"key": "model"}}})))
    wanted = latent(executor.run(prompt("2", **{"1": {"class_type": "Given", "inputs": {"key": "reference"}}})))
    assert relative_error(parallel, wanted) < CLOSE


class _Other(torch.Tensor):
    """A tensor of another extension."""


def test_a_weight_of_another_extension_is_refused_by_name(folder: Path) -> None:
    native = CASE.native()
    module = native.model.diffusion_model.x_embedder.proj
    module.weight = torch.nn.Parameter(module.weight.detach().as_subclass(_Other), requires_grad=False)
    with pytest.raises(InvalidRequest, match=r"x_embedder\.proj\.weight is a _Other of torch\.float32"):
        copy_model(native)
