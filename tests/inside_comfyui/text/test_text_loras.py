"""LoRAs on the backend's text encoder against the same LoRAs on ComfyUI's own."""

from collections.abc import Callable

import comfy.hooks
import comfy.lora
import comfy.model_patcher
import comfy.sd
import pytest
import torch
from any_folder_name.nodes.backend import session
from any_folder_name.nodes.remote import recent_files
from any_folder_name.parallel_backend.errors import InvalidRequest
from helpers import loras
from helpers.inside_fixtures import Loaded, relative_error
from helpers.native_text import core_encoder, encode

TEXT = "a (red:1.3) circle on blue"


def native_patcher(loaded: Loaded) -> comfy.model_patcher.ModelPatcher:
    """Return ComfyUI's own encoder in a module of the names that its CLIP has."""
    module = torch.nn.Module()
    module.umt5xxl = core_encoder(loaded)
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(module, load_device=cpu, offload_device=cpu)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_lora_equals_comfyui(kind: str, load_remote: Callable[..., Loaded]) -> None:
    loaded = load_remote()
    native = native_patcher(loaded)
    lora = loras.text(native.model, kind, seed=1)
    native.add_patches(comfy.lora.load_lora(lora, comfy.lora.model_lora_keys_clip(native.model, {})), 0.7)
    native.patch_model(torch.device("cpu"))
    reference = native.model.umt5xxl.encode_token_weights(loaded.clip.tokenize(TEXT)["umt5xxl"])[0]
    before = encode(loaded.clip, TEXT)
    _, clip = comfy.sd.load_lora_for_models(None, loaded.clip, dict(lora), 0.0, 0.7)
    assert relative_error(before, reference) > 1e-2
    assert relative_error(encode(clip, TEXT), reference) < 1e-4
    assert torch.equal(encode(loaded.clip, TEXT), before)


@pytest.mark.skipif(not loras.HAS_BYPASS, reason="not in this version of ComfyUI")
def test_a_bypassed_lora_equals_a_merged_one(load_remote: Callable[..., Loaded]) -> None:
    loaded = load_remote()
    lora = loras.text(native_patcher(loaded).model, "lora", seed=1)
    _, merged = comfy.sd.load_lora_for_models(None, loaded.clip, dict(lora), 0.0, 0.7)
    _, bypassed = comfy.sd.load_bypass_lora_for_models(None, loaded.clip, dict(lora), 0.0, 0.7)
    assert relative_error(encode(loaded.clip, TEXT), encode(merged, TEXT)) > 1e-2
    assert relative_error(encode(bypassed, TEXT), encode(merged, TEXT)) < 1e-5


def test_a_lora_keeps_its_weights_when_its_file_is_freed(load_remote: Callable[..., Loaded]) -> None:
    loaded = load_remote()
    clips = []
    for seed in (3, 4):
        lora = loras.text(native_patcher(loaded).model, "lora", seed=seed)
        clips.append(comfy.sd.load_lora_for_models(None, loaded.clip, dict(lora), 0.0, 0.7)[1])
    first = encode(clips[0], TEXT)
    for _ in range(recent_files._KEPT_SAMPLINGS):
        session.current().part(recent_files.RecentFiles).begin_sampling()
    encode(loaded.clip, TEXT)
    loaded.clip.cond_stage_model.handle.unload()  # the ranks forget their factors
    assert not torch.equal(encode(clips[1], TEXT), first)
    assert torch.equal(encode(clips[0], TEXT), first)


def test_what_would_be_ignored_is_refused_by_name(load: Callable[..., Loaded]) -> None:
    loaded = load()
    patched, wrapped = loaded.clip.clone(), loaded.clip.clone()
    patched.patcher.add_object_patch("reset_clip_options", lambda: None)
    layer = "umt5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q.weight"
    wrapped.patcher.add_weight_wrapper(layer, lambda weight: weight)
    for clip, what in ((patched, "reset_clip_options"), (wrapped, layer)):
        with pytest.raises(InvalidRequest, match=f"a node changes {what} of this CLIP"):
            encode(clip, TEXT)
    assert not loaded.client.work
    assert torch.isfinite(encode(loaded.clip, TEXT)).all()


def test_a_hook_with_a_schedule_equals_comfyui(load_remote: Callable[..., Loaded]) -> None:
    loaded = load_remote()
    lora = loras.text(native_patcher(loaded).model, "lora", seed=2)
    hooks = comfy.hooks.create_hook_lora(lora, 0.0, 0.7)
    keyframes = comfy.hooks.HookKeyframeGroup()
    for strength, start in ((1.0, 0.0), (0.5, 0.5)):
        keyframes.add(comfy.hooks.HookKeyframe(strength=strength, start_percent=start))
    hooks.set_keyframes_on_hooks(keyframes)
    clip = loaded.clip.clone()
    clip.use_clip_schedule = True
    clip.patcher.forced_hooks = hooks
    clip.patcher.register_all_hook_patches(hooks, comfy.hooks.create_target_dict(comfy.hooks.EnumWeightTarget.Clip), {})
    scheduled = clip.encode_from_tokens_scheduled(clip.tokenize(TEXT), show_pbar=False)
    for (embedding, _), strength in zip(scheduled, (0.7, 0.35), strict=True):
        _, fixed = comfy.sd.load_lora_for_models(None, loaded.clip, dict(lora), 0.0, strength)
        assert relative_error(embedding, encode(fixed, TEXT)) < 1e-5
