"""The dtype that ``auto`` chooses is the one that ComfyUI would compute the same file in."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import comfy.cli_args
import comfy.model_management
import comfy.sd
import comfy.supported_models_base
import comfy.utils
import pytest
import torch
from any_folder_name.nodes.backend import session
from any_folder_name.nodes.bridges.compute_dtype import auto_dtype
from any_folder_name.nodes.families.registry import bridge_for
from any_folder_name.parallel_backend.checkpoint.opening import open_checkpoint
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.families.registry import family_of
from any_folder_name.parallel_backend.protocol.model_spec import Devices
from helpers import compressed_files
from natives.files import FILE_CASES, FIRST_FILES, metadata
from safetensors.torch import save_file

GPUS = Devices(kind="cuda", indices=(0, 1))
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

FIXED = {"hunyuan_video t2v": {"vec_in_dim": 768}, "ltx t2v": {"caption_channels": 4096}}
"""Sizes that ComfyUI does not read from a file."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """ComfyUI's questions about its GPU, answered as on one that supports bf16 and fp16."""
    monkeypatch.setattr(comfy.model_management, "cpu_state", comfy.model_management.CPUState.GPU)
    for name in ("should_use_fp16", "should_use_bf16"):
        monkeypatch.setattr(comfy.model_management, name, lambda *args, **options: True)
    monkeypatch.setattr(comfy.model_management, "supports_fp8_compute", lambda device: False)
    monkeypatch.setattr(comfy.model_management, "get_torch_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(comfy.model_management, "maximum_vram_for_weights", lambda device: 1 << 40)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def bridge(tmp_path: Path, case: str, dtype: torch.dtype) -> Any:
    tiny = replace(FILE_CASES[case], unet={**FILE_CASES[case].unet, **FIXED.get(case, {})})
    weights = tiny.native().model.diffusion_model.state_dict()
    stored = {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}
    save_file(stored, tmp_path / "tiny.safetensors", metadata(tiny))
    return bridge_for(open_checkpoint(tmp_path / "tiny.safetensors"))


def native(path: Path) -> torch.dtype:
    """Return the dtype that ComfyUI computes in after it has loaded a file."""
    model = comfy.sd.load_diffusion_model(str(path)).model
    return model.manual_cast_dtype or model.get_dtype()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("case", ["sd3 3.5 medium", "hunyuan_video t2v", "ltx t2v"])
def test_the_gpu_computes_as_comfyui_does(case: str, stored: str, tmp_path: Path) -> None:
    ours = bridge(tmp_path, case, FLOATS[stored])
    assert NAMES[auto_dtype(ours, GPUS)] == native(ours.checkpoint.path)


class Chosen(Exception):
    """What ComfyUI has chosen for a file, before it creates the model."""


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], torch.dtype]:
    """Return the dtype that ComfyUI chooses to compute a file in, without its weights' shapes having to fit."""

    def choose(_config: Any, dtype: torch.dtype, manual_cast: torch.dtype | None, **_: Any) -> None:
        raise Chosen(manual_cast or dtype)

    def run(path: Path) -> torch.dtype:
        weights = comfy.utils.load_torch_file(str(path))
        with monkeypatch.context() as patched:
            patched.setattr(comfy.supported_models_base.BASE, "set_inference_dtype", choose)
            with pytest.raises(Chosen) as found:
                comfy.sd.load_diffusion_model_state_dict(weights)
        dtype: torch.dtype = found.value.args[0]
        return dtype

    return run


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("has_bf16", [True, False])
@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("deviation", [0.3, 0.5])
@pytest.mark.daily(5)
def test_z_image_computes_in_fp16_where_its_weights_allow_it(
    deviation: float, stored: str, has_bf16: bool, tmp_path: Path, chosen: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(comfy.model_management, "should_use_bf16", lambda *args, **options: has_bf16)
    case = FILE_CASES["z_image image"]
    weights = replace(case, unet={**case.unet, "n_layers": 3}).native().model.diffusion_model.state_dict()
    weights |= {"cap_embedder.1.weight": torch.zeros(3840, 24)}  # the width by which ComfyUI knows Z-Image
    norm = weights["layers.1.ffn_norm1.weight"]
    weights |= {"layers.1.ffn_norm1.weight": 1 + deviation * torch.tensor([-1.0, 1.0]).repeat(len(norm) // 2)}
    dtype = FLOATS[stored]
    file = {f"model.diffusion_model.{name}": tensor.to(dtype).contiguous() for name, tensor in weights.items()}
    save_file(file, tmp_path / "tiny.safetensors")
    ours = bridge_for(open_checkpoint(tmp_path / "tiny.safetensors"))
    assert NAMES[auto_dtype(ours, GPUS)] == chosen(tmp_path / "tiny.safetensors")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("said", [True, False, None])
def test_a_copied_z_image_says_what_its_file_allowed(said: bool | None, tmp_path: Path) -> None:
    weights = FILE_CASES["z_image image"].native().model.diffusion_model.state_dict()
    transformer = {} if said is None else {"allow_fp16": said}
    file = tmp_path / "tiny.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file, metadata={
        "config": json.dumps({"transformer": transformer}),
    })  # fmt: skip
    with file.open("rb") as copied:
        ours = bridge_for(open_checkpoint(f"/proc/{os.getpid()}/fd/{copied.fileno()}"))
        assert ours.values_for_dtype() == {"allow_fp16": bool(said)}


@pytest.mark.usefixtures("gpu")
def test_numbers_count_and_not_bytes(tmp_path: Path, chosen: Any) -> None:
    weights = FILE_CASES["flux dev"].native().model.diffusion_model.state_dict()
    half, total = 0, sum(tensor.numel() for tensor in weights.values())
    for name, tensor in weights.items():
        weights[name] = tensor.half() if half < 0.55 * total else tensor.float()
        half += tensor.numel()
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, tmp_path / "tiny.safetensors")
    ours = bridge_for(open_checkpoint(tmp_path / "tiny.safetensors"))
    counts = ours.checkpoint.stored_numbers("transformer")
    assert counts.total() == total
    assert 2 * counts["F16"] < 4 * counts["F32"]
    assert NAMES[auto_dtype(ours, GPUS)] == chosen(tmp_path / "tiny.safetensors") == torch.float16


@pytest.mark.usefixtures("gpu")
def test_the_number_of_parameters_counts(tmp_path: Path, chosen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fp16(device: Any = None, model_params: int = 0, prioritize_performance: bool = True, **_: Any) -> bool:
        return not prioritize_performance or model_params > 1000

    monkeypatch.setattr(comfy.model_management, "should_use_fp16", fp16)
    monkeypatch.setattr(comfy.model_management, "should_use_bf16", lambda *args, **options: False)
    ours = bridge(tmp_path, "sd3 3.5 medium", torch.float32)
    assert NAMES[auto_dtype(ours, GPUS)] == chosen(ours.checkpoint.path) == torch.float16


@pytest.mark.newest
@pytest.mark.parametrize("case", FIRST_FILES)
@pytest.mark.daily(5)
def test_a_family_fits_into_float16_if_comfyui_computes_it_so(case: str, tmp_path: Path) -> None:
    ours = bridge(tmp_path, case, torch.bfloat16)
    family = family_of(ours.checkpoint.components["transformer"])
    assert family.float16 == (torch.float16 in ours.core_config().supported_inference_dtypes)


def test_cpus_compute_in_float32(tmp_path: Path) -> None:
    assert (
        auto_dtype(bridge(tmp_path, "sd3 3.5 medium", torch.bfloat16), Devices(kind="cpu", indices=(0,))) == "float32"
    )


def test_a_comfyui_on_the_cpu_leaves_the_choice_to_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comfy.model_management, "cpu_mode", lambda: True)
    assert auto_dtype(bridge(tmp_path, "ltx t2v", torch.bfloat16), GPUS) == "auto"
    assert auto_dtype(bridge(tmp_path, "ltx t2v", torch.float16), GPUS) == "bfloat16"


@pytest.fixture(params=["on another machine", "not seen"])
def unseen(request: pytest.FixtureRequest, gpu: None, monkeypatch: pytest.MonkeyPatch) -> Devices:
    """GPUs that ComfyUI cannot be asked about."""

    def ask(device: torch.device | None = None, *_: Any, **__: Any) -> bool:
        assert device is None or device.type == "cpu", "Invalid device id"
        return True

    for name in ("should_use_fp16", "should_use_bf16", "supports_fp8_compute"):
        monkeypatch.setattr(comfy.model_management, name, ask)
    elsewhere = request.param == "on another machine"
    monkeypatch.setattr(session, "_session", [session.Session(cast(Any, SimpleNamespace(remote=elsewhere)))])
    return GPUS if elsewhere else replace(GPUS, indices=(2, 3))


def test_the_ranks_choose_on_gpus_that_comfyui_does_not_see(unseen: Devices, tmp_path: Path) -> None:
    assert auto_dtype(bridge(tmp_path, "ltx t2v", torch.bfloat16), unseen) == "auto"
    assert auto_dtype(bridge(tmp_path, "ltx t2v", torch.float8_e4m3fn), unseen) == "auto"
    assert auto_dtype(bridge(tmp_path, "ltx t2v", torch.float16), unseen) == "bfloat16"


@pytest.mark.parametrize(
    ("option", "expected"),
    [("bf16_unet", "bfloat16"), ("fp16_unet", "float16"), ("fp32_unet", "float32"), ("fp64_unet", None),
     ("fp8_e4m3fn_unet", None)],
)  # fmt: skip
def test_comfyuis_options_count_for_gpus_that_it_does_not_see(
    option: str, expected: str | None, unseen: Devices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = bridge(tmp_path, "ltx t2v", torch.bfloat16)
    monkeypatch.setattr(comfy.cli_args.args, option, True)
    if expected:
        assert auto_dtype(ours, unseen) == expected
    else:
        with pytest.raises(InvalidRequest, match="options ask for weights in torch"):
            auto_dtype(ours, unseen)
    monkeypatch.setattr(comfy.model_management, "FORCE_FP32", True)
    assert auto_dtype(ours, unseen) == "float32"


@pytest.mark.usefixtures("gpu")
def test_comfyuis_options_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = bridge(tmp_path, "sd3 3.5 medium", torch.float32)
    monkeypatch.setattr(comfy.cli_args.args, "bf16_unet", True)
    assert auto_dtype(ours, GPUS) == "bfloat16"
    monkeypatch.setattr(comfy.cli_args.args, "fp32_unet", True)
    assert auto_dtype(ours, GPUS) == "float32"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("option", ["fp8_e4m3fn_unet", "fp64_unet"])
def test_an_option_that_the_ranks_cannot_follow_is_refused(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = bridge(tmp_path, "sd3 3.5 medium", torch.bfloat16)
    monkeypatch.setattr(comfy.cli_args.args, option, True)
    with pytest.raises(InvalidRequest, match="options ask for weights in torch"):
        auto_dtype(ours, GPUS)


@pytest.mark.newest
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("largest", "allowed"), [(1.0, True), (40.0, False)])
def test_a_gguf_file_is_asked_for_the_deviation_of_a_norm(largest: float, allowed: bool, tmp_path: Path) -> None:
    case = FILE_CASES["z_image image"]
    weights = case.native().model.diffusion_model.state_dict()
    norm = torch.ones_like(weights["layers.0.ffn_norm1.weight"])
    norm[0] = largest
    weights["layers.0.ffn_norm1.weight"] = norm
    decoded = compressed_files.write_gguf(tmp_path / "tiny.gguf", weights, "Q8_0", architecture="lumina2")
    save_file(decoded, tmp_path / "tiny.safetensors")
    for name in ("tiny.safetensors", "tiny.gguf"):
        ours = bridge_for(open_checkpoint(tmp_path / name))
        ours.config = {**ours.config, "n_layers": 2}  # the tiny model has no norm in the last layer but one
        assert ours.values_for_dtype() == {"allow_fp16": allowed}
    assert auto_dtype(bridge_for(open_checkpoint(tmp_path / "tiny.gguf")), GPUS) == "bfloat16"
