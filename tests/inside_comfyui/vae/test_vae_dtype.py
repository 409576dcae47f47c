"""The dtype of a VAE is the one that ComfyUI's own VAE chooses."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import comfy.cli_args
import comfy.model_management
import comfy.sd
import pytest
import torch
from any_folder_name.nodes.backend import session
from any_folder_name.nodes.bridges.compute_dtype import auto_vae_dtype, loaded_vae_dtype
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.protocol.model_spec import Devices
from any_folder_name.parallel_backend.vaes import VAES
from helpers.native_vaes import NATIVE

GPUS, CPUS = Devices(kind="cuda", indices=(0, 1)), Devices(kind="cpu", indices=(0, 1))
TEMPORAL = {"decoder.mid.block_1.mix_factor": torch.zeros(1)}
"""What ComfyUI knows a decoder over time by."""
WIDE = "decoder.conv_in.weight"
"""The weight from which newer ComfyUIs read the width of an image VAE."""


class Chosen(Exception):
    """The dtype that ComfyUI has chosen for a VAE."""


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, torch.Tensor]], str]:
    """Return the name of the dtype that ComfyUI's VAE chooses for weights, before it reads them."""
    choose = comfy.model_management.vae_dtype

    def chose(*args: Any) -> None:
        raise Chosen(str(choose(*args)).removeprefix("torch."))

    def run(weights: dict[str, torch.Tensor]) -> str:
        with monkeypatch.context() as patched, torch.device("meta"):
            patched.setattr(comfy.model_management, "vae_dtype", chose)
            # Its modules have the published widths.
            patched.setattr(torch.nn.Module, "load_state_dict", lambda *args, **options: ([], []))
            with pytest.raises(Chosen) as found:
                comfy.sd.VAE(sd=dict(weights))
        return str(found.value)

    return run


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """ComfyUI's questions about its GPU, answered as on one that has fp16 and bf16. A CPU has neither."""
    monkeypatch.setattr(comfy.model_management, "cpu_state", comfy.model_management.CPUState.GPU)
    monkeypatch.setattr(comfy.model_management, "get_torch_device", lambda: torch.device("cuda", 0))
    for name in ("should_use_fp16", "should_use_bf16"):
        monkeypatch.setattr(comfy.model_management, name, lambda device=None, **_: device.type == "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def weights_of(name: str) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the weights by ComfyUI's names, and our VAE."""
    if name == "temporal":
        return TEMPORAL, VAES["AutoencoderKLTemporalDecoder"]({})
    native, theirs = NATIVE[name]()
    weights = native.state_dict()
    if WIDE in weights:
        weights |= {WIDE: torch.zeros(512, *weights[WIDE].shape[1:])}
    return weights, VAES[type(theirs).__name__](theirs.config)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", [*NATIVE, "temporal"])
def test_each_class_has_the_dtype_of_comfyuis(name: str, chosen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, vae = weights_of(name)
    expected = "float16" if name == "mochi" else "bfloat16"
    assert auto_vae_dtype(vae, GPUS) == chosen(weights) == expected
    monkeypatch.setattr(comfy.model_management, "should_use_bf16", lambda device=None, **_: False)
    assert auto_vae_dtype(vae, GPUS) == chosen(weights)
    assert auto_vae_dtype(vae, CPUS) == "float32"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("devices", [GPUS, CPUS], ids=["gpu", "cpu"])
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("fp32_vae",), "float32"), (("fp16_vae",), "float16"), (("bf16_vae",), "bfloat16"), (("cpu_vae",), "float32"),
        (("cpu_vae", "bf16_vae"), "bfloat16"),
    ],
)  # fmt: skip
def test_flags_hold_on_every_device(
    flags: tuple[str, ...], expected: str, devices: Devices, chosen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flag in flags:
        monkeypatch.setattr(comfy.cli_args.args, flag, True)
    weights, vae = weights_of("wan21")
    assert auto_vae_dtype(vae, devices) == chosen(weights) == expected


def test_ranks_on_gpus_choose_for_a_comfyui_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _, vae = weights_of("wan21")
    assert auto_vae_dtype(vae, GPUS) == "auto"
    monkeypatch.setattr(comfy.cli_args.args, "fp32_vae", True)
    assert auto_vae_dtype(vae, GPUS) == "float32"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("remote", "index"), [(True, 0), (False, 2)])
def test_ranks_choose_on_gpus_that_comfyui_does_not_see(
    remote: bool, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_session", [session.Session(cast(Any, SimpleNamespace(remote=remote)))])
    _, vae = weights_of("wan21")
    devices = replace(GPUS, indices=(index, index + 1))
    assert auto_vae_dtype(vae, devices) == "auto"
    assert auto_vae_dtype(vae, CPUS) == "float32"
    for option, expected in (("FORCE_FP32", "float32"), ("bf16_vae", "bfloat16")):
        owner = comfy.model_management if option.isupper() else comfy.cli_args.args
        monkeypatch.setattr(owner, option, True)
        assert auto_vae_dtype(vae, devices) == expected


def test_a_loaded_vae_in_another_dtype_is_refused() -> None:
    assert loaded_vae_dtype(SimpleNamespace(vae_dtype=torch.float16)) == "float16"
    with pytest.raises(InvalidRequest, match=r"computes in torch\.float64: load it in bf16, fp16 or fp32"):
        loaded_vae_dtype(SimpleNamespace(vae_dtype=torch.float64))


@pytest.mark.parametrize("flag", [None, "bf16_vae"])
def test_the_loaders_vae_asks_for_it(flag: str | None, load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if flag:
        monkeypatch.setattr(comfy.cli_args.args, flag, True)
    loaded = load()
    loaded.vae.encode(loaded.vae.decode(torch.zeros(1, 16, 1, 2, 2))[0])
    asked = [message.dtype for kind in ("Decode", "Encode") for message in loaded.client.of_kind(kind)]
    assert asked == ["bfloat16" if flag else "float32"] * 2
