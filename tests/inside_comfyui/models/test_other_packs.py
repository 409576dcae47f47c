"""Nodes of other packs that need the layers are refused by their name, with what to use instead."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.model_management
import folder_paths
import pytest
import torch
from any_folder_name.nodes.bridges.instead import instead_of
from any_folder_name.nodes.bridges.refusals import Unavailable
from any_folder_name.parallel_backend.errors import InvalidRequest
from helpers.inside_fixtures import Loaded, conditioning, empty_latent, ksampler, parallel_sampler, relative_error
from helpers.packs import load_pack

SOURCE = Path(__file__).parents[1] / "helpers" / "their_pack"
CACHE = "use Parallel Cache, or ComfyUI's EasyCache or LazyCache, instead"
REMOVE = "remove that node"
REFUSED = {
    "TeaCacheLike": (r"uses diffusion_model\.forward_orig \(AttributeError: .*'forward_orig'\)", CACHE),
    "FirstBlockCacheLike": ("wraps or replaces the layer blocks", CACHE),
    "RegionalLike": (r"replaces diffusion_model\.__class__", REMOVE),
    "LegacyRegionalLike": ("makes Regional of the model's layers", REMOVE),
    "CompileLike": ("compiles diffusion_model", REMOVE),
    "CompileBlocksLike": ("compiles the model, as TorchCompileModel does, .*", REMOVE),
    "PerturbWeightsLike": (r"reads the values of weights \(to\)", REMOVE),
    "SageAttentionLike": (
        "chooses an attention kernel, .*",
        "the input attention of Parallel Loader or Parallel Model",
    ),
    "BlockSwapLike": (r"uses diffusion_model\.blocks\.0\.to", "ranks stream by themselves what they have no room for"),
    "RopeLike": (r"replaces diffusion_model\.rope_embedder", REMOVE),
    "SkipLayerLike": ("replaces double_block 0 of the model, .*", "use ComfyUI's SkipLayerGuidanceDiT instead"),
}
UNNAMED = ("RegionalLike", "CompileLike", "CompileBlocksLike", "RopeLike")
"""What these set has no code of the node: its pack is named, or nothing."""


@pytest.fixture
def pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The nodes of the pack that does what others do."""
    shutil.copytree(SOURCE, tmp_path / "Their-Pack")
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "custom_nodes", ([str(tmp_path)], set()))
    return load_pack(tmp_path / "Their-Pack", monkeypatch)


def sampled(kind: Any, model: Any) -> Any:
    """Run a node, and KSampler behind it."""
    return ksampler(kind().run(model)[0], empty_latent(), steps=1)


@pytest.mark.parametrize("node", REFUSED)
def test_a_node_of_another_pack_is_refused_by_its_name_and_says_what_to_use(
    node: str, pack: dict[str, Any], load: Callable[..., Loaded]
) -> None:
    loaded = load()
    what, instead = REFUSED[node]
    by = "(a node|a node of Their-Pack)" if node in UNNAMED else f"{node} of Their-Pack"
    with pytest.raises(InvalidRequest, match=f"^{by} {what}; the layers of a parallel model run in .*: {instead}"):
        sampled(pack[node], loaded.model)
    assert not loaded.client.work
    ksampler(loaded.model, empty_latent(), steps=1)


def patched_attention(model: Any) -> Any:
    """Change what the layers compute, as core's nodes do, in functions that no pack has made."""
    changed = model.clone()
    changed.set_model_attn1_patch(lambda q, k, v, options: (q, k, v))
    return changed


def wrapped_layer(model: Any) -> Any:
    """Wrap a layer, of which nothing tells who did it."""
    changed = model.clone()
    layers = changed.model.diffusion_model.named_modules()
    next(layer for _, layer in layers if isinstance(layer, torch.nn.Linear)).forward = lambda *args: args[0]
    return changed


@pytest.mark.parametrize("change", [patched_attention, wrapped_layer])
def test_a_packs_sampler_is_not_named_for_what_others_have_done(
    change: Callable[[Any], Any], pack: dict[str, Any], load: Callable[..., Loaded]
) -> None:
    model, sampler = change(load().model), pack["SamplerLike"]()
    options = {"positive": conditioning(1), "negative": conditioning(2), "latent_image": empty_latent()}
    with pytest.raises(InvalidRequest, match=f"^a node .*: {REMOVE}"):
        sampler.sample(model, 5, 3, 4.0, "euler", "simple", denoise=1.0, **options)


@pytest.mark.parametrize(
    ("node", "instead"),
    [
        ("TeaCache of ComfyUI-TeaCache", CACHE),
        ("ApplyFBCacheOnModel of Comfy-WaveSpeed", CACHE),
        ("a node of ComfyUI-TeaCache", CACHE),
        ("CompileModel of ComfyUI-TeaCache", REMOVE),
        ("VelocatorQuantizeModel of Comfy-WaveSpeed", REMOVE),
        ("PathchSageAttentionKJ of ComfyUI-KJNodes", "the input attention"),
        ("TokenUsageMessage of Their-Pack", REMOVE),
        ("SkipLayerGuidanceWanVideo of ComfyUI-KJNodes", "use ComfyUI's SkipLayerGuidanceDiT"),
        ("wanBlockSwap of Their-Pack", "ranks stream by themselves"),
        ("WanVideoBlockSwap of Their-Pack", "ranks stream by themselves"),
        ("", REMOVE),
    ],
)
def test_what_to_use_instead_follows_from_the_words_of_a_nodes_name(node: str, instead: str) -> None:
    assert instead_of(node).startswith(instead)


@pytest.mark.parametrize(
    ("node", "what"), [("LegacyCompileLike", "a node compiles"), ("ReplaceLike", "a node of Their-Pack replaces")]
)
def test_a_model_with_another_transformer_is_refused_and_can_be_unloaded(
    node: str, what: str, pack: dict[str, Any], load: Callable[..., Loaded]
) -> None:
    loaded = load()
    comfy.model_management.unload_all_models()  # those of other tests
    ksampler(loaded.model, empty_latent(), steps=1)
    loaded.client.requests.clear()
    changed = pack[node]().run(loaded.model)[0]
    for sample in (ksampler, parallel_sampler):
        with pytest.raises(InvalidRequest, match=f"^{what} diffusion_model; the layers .*: {REMOVE}"):
            sample(changed, empty_latent())
    comfy.model_management.unload_all_models()
    assert [type(message).__name__ for message, _ in loaded.client.requests] == ["Unload"]


def test_what_such_a_node_asks_for_is_an_attribute_error(pack: dict[str, Any], load: Callable[..., Loaded]) -> None:
    with pytest.raises(AttributeError) as error:
        sampled(pack["TeaCacheLike"], load().model)
    assert isinstance(error.value, Unavailable)
    assert "\n" not in str(error.value)


def test_the_class_is_that_of_comfyuis_transformer(native: Any, loaded: Loaded) -> None:
    ours, theirs = loaded.model.model.diffusion_model, native.model.diffusion_model
    assert ours.__class__ is theirs.__class__
    assert isinstance(ours, theirs.__class__)
    assert type(ours).__name__ == "RemoteTransformer"


def test_other_faults_of_packs_stay_theirs(pack: dict[str, Any], native: Any, load: Callable[..., Loaded]) -> None:
    loaded = load()
    with pytest.raises(ValueError, match=r"^a fault of their own$") as fault:
        sampled(pack["AskingLike"], loaded.model)
    assert not isinstance(fault.value, InvalidRequest)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        sampled(pack["InterruptedLike"], loaded.model)
    result = ksampler(loaded.model, empty_latent())
    assert relative_error(result, ksampler(native, empty_latent())) < 1e-4
