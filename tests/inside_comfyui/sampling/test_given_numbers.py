"""Numbers of any kind that a link can carry: nodes of ComfyUI hand over tensors, NumPy numbers and bools."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import comfy.hooks
import node_helpers
import numpy as np
import pytest
import torch
from any_folder_name.nodes.bridges.given_numbers import as_float, as_int
from any_folder_name.nodes.class_label import ParallelClassLabel
from any_folder_name.nodes.layout import ParallelLayoutNode
from any_folder_name.nodes.vae import ParallelVAEDecode, ParallelVAEEncode
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from comfy_extras.nodes_hooks import CreateHookKeyframesInterpolated
from helpers import loras
from helpers.inside_fixtures import Loaded, empty_latent, ksampler, parallel_sampler, relative_error
from natives import CASES

import nodes as core_nodes

CLOSE, FAR = 1e-4, 1e-2
KINDS: dict[str, Callable[[float], Any]] = {
    "NumPy": np.float64,
    "NumPy, 32 bits": np.float32,
    "tensor": torch.tensor,
    "tensor of one": lambda number: torch.tensor([number]),
    "array": np.array,
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_they_become_plain_numbers(kind: Callable[[float], Any]) -> None:
    assert [type(as_float(kind(each), "cfg")) for each in (0.5, 2, True)] == [float] * 3
    assert [as_float(kind(each), "cfg") for each in (0.5, 2, True)] == [0.5, 2.0, 1.0]
    assert [(type(found), found) for found in (as_int(kind(each), "tile") for each in (3, 4.0, True))] == [
        (int, 3), (int, 4), (int, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("number", [2**64 - 1, np.uint64(2**64 - 1), 2**53 + 1, torch.tensor(2**53 + 1)])
def test_no_digit_is_lost(number: Any) -> None:
    assert as_int(number, "seed") == int(number)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.tensor([1.0, 2.0]), r"^cfg has the shape \[2\]: a single number is needed$"),
        (np.zeros((2, 3)), r"^cfg has the shape \[2, 3\]"),
        (torch.tensor(torch.nan), "^cfg is nan: a finite number is needed"),
        (np.float32("inf"), "^cfg is inf"),
        ("4", "^cfg is '4': a number is needed$"),
        (None, "^cfg is None"),
        (torch.tensor(1j), "^cfg is 1j"),
    ],
)
def test_what_is_no_number_is_refused(value: Any, message: str) -> None:
    for plain in (as_float, as_int):
        with pytest.raises(InvalidRequest, match=message):
            plain(value, "cfg")


def test_what_is_not_whole_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^tile is 2\.5: a whole number is needed$"):
        as_int(np.float32(2.5), "tile")


@pytest.mark.parametrize("file", ["plain", "dora"])
@pytest.mark.parametrize("name", ["z_image image", "sd3 medium", "qwen_image image"])
@pytest.mark.daily(2)
def test_interpolated_keyframes_equal_comfyui(name: str, file: str, load_case: Callable[..., Any]) -> None:
    """CreateHookKeyframesInterpolated makes tensors of the strengths and the percents."""
    case = CASES[name]
    native, latent = case.native(), case.samples()
    hooks = comfy.hooks.create_hook_lora(_lora(native, file), 0.9, 0.0)
    (keyframes,) = CreateHookKeyframesInterpolated().create_hook_keyframes(0.2, 1.0, "linear", 0.0, 1.0, 4)
    hooks.set_keyframes_on_hooks(keyframes)
    options = {**loras.options_of(case), "cfg": 3.0, "steps": 4}
    hooked = options | {"positive": node_helpers.conditioning_set_values(options["positive"], {"hooks": hooks})}
    reference = ksampler(case.patch(native), latent, **hooked)
    assert relative_error(ksampler(case.patch(native), latent, **options), reference) > FAR
    remote = case.patch(load_case(name, ParallelLayout.parse("cfg=2")))
    for sample in (ksampler, parallel_sampler):
        assert relative_error(sample(remote, latent, **hooked), reference) < CLOSE


def _lora(native: Any, file: str) -> loras.Lora:
    if file == "plain":
        return loras.plain(native, "diffusion_model.", rank=3, seed=1)
    return loras.other(native, file, seed=1)


@pytest.mark.newest
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_a_strength_of_any_kind(kind: Callable[[float], Any], load_case: Callable[..., Any]) -> None:
    case, remote = CASES["sd3 medium"], load_case("sd3 medium", ParallelLayout.parse("ulysses=2"))
    native, latent, options = case.native(), case.samples(), loras.options_of(case)
    for file in ("plain", "dora"):
        lora = _lora(native, file)
        reference = ksampler(loras.on_model(native, (lora, 0.5)), latent, **options)
        for sample in (ksampler, parallel_sampler):
            changed = loras.on_model(remote, (lora, kind(0.5)))
            assert relative_error(sample(changed, latent, **options), reference) < CLOSE
    assert relative_error(ksampler(native, latent, **options), reference) > FAR


def test_all_layers_of_a_lora_are_one_file(load_case: Callable[..., Any]) -> None:
    """Whatever kind of number its strength is: equal tensors are not one another's key."""
    case, remote = CASES["sd3 medium"], load_case("sd3 medium", ParallelLayout.parse("ulysses=2"))
    lora = loras.plain(case.native(), "diffusion_model.", rank=3, seed=1)
    model = loras.on_model(remote, ({name: each for name, each in lora.items() if "joint_blocks" in name}, 0.5))
    with model.prepared_changes():
        (plain,) = model.target.changes.adapters
    for changes in model.patches.values():
        changes[:] = [(torch.tensor(strength), *rest) for strength, *rest in changes]
    with model.prepared_changes():
        assert model.target.changes.adapters == (plain,)


@pytest.mark.parametrize("strength", [torch.ones(2), torch.tensor(torch.nan)])
def test_a_strength_that_is_no_number_is_refused_at_its_node(strength: Any, load_case: Callable[..., Any]) -> None:
    case, remote = CASES["sd3 medium"], load_case("sd3 medium", ParallelLayout.parse("ulysses=2"))
    lora = loras.plain(case.native(), "diffusion_model.", rank=3, seed=1)
    with pytest.raises(InvalidRequest, match=r"^the strength of the LoRA (has the shape|is nan)"):
        loras.on_model(remote, (lora, strength))


@pytest.mark.parametrize("strength", [torch.ones(2), torch.tensor(torch.nan)])
def test_a_hooks_strength_that_is_no_number_is_refused(strength: Any, load_case: Callable[..., Any]) -> None:
    case, remote = CASES["sd3 medium"], load_case("sd3 medium", ParallelLayout.parse("ulysses=2"))
    hooks = comfy.hooks.create_hook_lora(_lora(case.native(), "plain"), strength, 0.0)
    options = loras.options_of(case)
    options["positive"] = node_helpers.conditioning_set_values(options["positive"], {"hooks": hooks})
    for sample in (ksampler, parallel_sampler):
        with pytest.raises(InvalidRequest, match=r"^the strength of the LoRA (has the shape \[2\]|is nan)"):
            sample(remote, case.samples(), **options)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_parallel_sampler_takes_them(native: Any, loaded: Loaded, kind: Callable[[float], Any]) -> None:
    plain = {"seed": 1, "steps": 3, "cfg": 4.0, "denoise": 0.5}
    reference = ksampler(native, empty_latent(), **plain)
    for seed in (kind(1), True):
        given = {name: kind(number) for name, number in plain.items()} | {"seed": seed}
        assert relative_error(parallel_sampler(loaded.model, empty_latent(), **given), reference) < CLOSE
    for message in loaded.client.of_kind("Sample"):
        assert (type(message.seed), type(message.cfg)) == (int, float)


@pytest.mark.parametrize("name", ["seed", "steps", "cfg", "denoise"])
def test_parallel_sampler_names_what_is_no_number(loaded: Loaded, name: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{name} has the shape \[2\]"):
        parallel_sampler(loaded.model, empty_latent(), **{name: torch.ones(2)})
    assert not loaded.client.work


@pytest.mark.parametrize("kind", [np.int64, torch.tensor, float, np.float32])
def test_tiles_of_any_kind(loaded: Loaded, kind: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    latent = {"samples": torch.randn(1, 16, 1, 6, 6, generator=torch.Generator().manual_seed(3))}
    hidden = SimpleNamespace(unique_id="7", prompt=None, extra_pnginfo=None)
    nodes = [type("Prepared", (node,), {"hidden": hidden}) for node in (ParallelVAEDecode, ParallelVAEEncode)]
    pixels = nodes[0].execute(latent, loaded.vae, kind(64)).args[0]
    nodes[1].execute(pixels, loaded.vae, kind(64))
    core_nodes.VAEDecodeTiled().decode(loaded.vae, latent, kind(512), kind(64))
    tiles = [(message.tile, type(message.tile)) for message, _ in loaded.client.requests]
    assert tiles == [(64, int), (64, int), (0, int)]


@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
def test_a_layer_of_the_text_encoder_of_any_kind(loaded: Loaded, kind: Callable[[int], Any]) -> None:
    (clip,) = core_nodes.CLIPSetLastLayer().set_last_layer(loaded.clip, kind(-2))
    clip.encode_from_tokens(clip.tokenize("a circle"))
    assert [(message.layer, type(message.layer)) for message in loaded.client.of_kind("EncodeText")] == [(-2, int)]


@pytest.mark.parametrize("kind", [np.int64, torch.tensor, float])
def test_layouts_and_labels_of_any_kind(kind: Callable[[int], Any]) -> None:
    degrees = {"data": 1, "cfg": 2, "pipe": 2, "ring": 1, "ulysses": 1, "tensor": 1}
    options = {"shard_weights": False, "patches": 3, "warmup": 2}
    given = {name: kind(number) for name, number in (degrees | options).items()}
    layout = ParallelLayoutNode.execute(**given).args[0]
    assert dataclasses.asdict(layout) == dataclasses.asdict(ParallelLayout(**degrees, **options))
    assert {type(value) for value in dataclasses.asdict(layout).values()} == {int, bool, str, tuple}
    with pytest.raises(InvalidRequest, match=r"^layout cfg is 1\.5: a whole number is needed$"):
        ParallelLayoutNode.execute(**given | {"cfg": 1.5})
    ((_, extra),) = ParallelClassLabel.execute(kind(5)).args[0]
    assert (extra["class_labels"], type(extra["class_labels"])) == (5, int)
