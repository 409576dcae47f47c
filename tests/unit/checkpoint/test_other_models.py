"""Files that hold another model, kind of model or variant than the supported ones: each is named."""

import json

import diffusers
import pytest
import torch
from safetensors.torch import save_file

from parallel_backend.checkpoint.architectures import architectures, recognise
from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.errors import InvalidRequest
from tests.support import families
from tests.support.families import weights

WAN = "WanTransformer3DModel"
LTX = "LTXVideoTransformer3DModel"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"vector_in.in_layer.bias": torch.zeros(2), "double_blocks.0.img_attn.norm.scale": torch.zeros(2)},
            "the nearest is FluxTransformer2DModel",
        ),
        ({"joint_blocks.0.context_block.attn.qkv.bias": torch.zeros(2)}, "the nearest is SD3Transformer2DModel"),
    ],
)
def test_an_unknown_architecture_is_refused_with_the_nearest(tmp_path, tensors, message):
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InvalidRequest, match=message):
        open_checkpoint(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["diffusion_model.blocks.0.self_attn.q.lora_A.weight", "diffusion_model.vace_blocks.0.ffn.0.lora_A.weight"],
         "holds a LoRA .*LoraLoaderModelOnly"),
        (["lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight"], "holds a LoRA"),
        (["model.diffusion_model.input_blocks.0.0.weight", "model.diffusion_model.middle_block.1.proj_in.weight"],
         r"holds a UNet, as Stable Diffusion 1.5 and SDXL have \(it has .*input_blocks.0.0.weight\): only"),
        (["down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k.weight", "conv_in.weight"], "holds a UNet"),
        (["control_model.input_blocks.0.0.weight", "control_model.input_hint_block.0.weight"], "holds a ControlNet"),
        (["encoder.block.0.layer.0.SelfAttention.q.weight", "shared.weight"], "holds a text encoder .*Load CLIP"),
        (["text_model.encoder.layers.0.self_attn.q_proj.weight"], "holds a text encoder"),
        (["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"], "holds a text encoder"),
        (["decoder.block.0.layer.0.SelfAttention.q.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"],
         "holds a text encoder"),
        (["something.weight"], "the weights belong to no supported architecture; supported: Chroma"),
        ([], "the weights belong to no supported architecture; supported: Chroma"),
    ],
)  # fmt: skip
def test_a_file_of_another_kind_is_named_in_words(tmp_path, names, message):
    save_file({name: torch.zeros(2, 2) for name in names}, tmp_path / "other.safetensors")
    with pytest.raises(InvalidRequest, match=f"^other.safetensors: .*{message}"):
        open_checkpoint(tmp_path / "other.safetensors")


@pytest.mark.parametrize(
    ("names", "model"),
    [
        (["double_blocks.0.img_attn.norm.key_norm.scale", "nerf_blocks.0.norm.scale", "img_in_patch.weight",
          "distilled_guidance_layer.in_proj.weight"], "Chroma Radiance"),
        (["txt_in.individual_token_refiner.blocks.0.norm1.weight", "img_in.proj.weight", "byt5_in.fc1.weight"],
         "HunyuanVideo 1.5 or HunyuanImage"),
    ],
)  # fmt: skip
def test_a_relative_without_our_names_is_named(names, model):
    with pytest.raises(InvalidRequest, match=rf"the file holds {model} \(it has"):
        recognise(dict.fromkeys(names, (2, 2)), {}, architectures())


def test_an_ltx_file_that_does_not_say_its_version_is_refused(tmp_path):
    save_file(weights(LTX), tmp_path / "model.safetensors")
    with pytest.raises(InvalidRequest, match=r"model.safetensors: .* from LTX-Video 0.9.5 on: .*original names"):
        open_checkpoint(tmp_path / "model.safetensors")


def test_cogvideox_2b_and_5b_need_a_folder(tmp_path):
    variants = [name for each, name in families.variants() if each == "CogVideoXTransformer3DModel"]
    older = next(
        i for i, name in enumerate(variants)
        if families.module("CogVideoXTransformer3DModel", name).config.patch_size_t is None
    )  # fmt: skip
    save_file(weights("CogVideoXTransformer3DModel", older), tmp_path / "model.safetensors")
    with pytest.raises(InvalidRequest, match=r"holds CogVideoX 2B or 5B, .*folder in diffusers layout"):
        open_checkpoint(tmp_path / "model.safetensors")


def test_a_variant_of_another_model_is_named(tmp_path):
    save_file(weights(WAN) | {"vace_patch_embedding.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidRequest, match="the file holds Wan VACE"):
        open_checkpoint(tmp_path / "model.safetensors")


OTHER_MODELS: list[tuple[str, str, str]] = [
    (WAN, "vace_patch_embedding.weight", "Wan VACE"),
    (WAN, "control_adapter.conv.weight", "Wan Fun Camera"),
    (WAN, "casual_audio_encoder.encoder.final_linear.weight", "Wan S2V"),
    (WAN, "audio_proj.audio_proj_glob_1.layer.bias", "HuMo or InfiniteTalk"),
    (WAN, "face_adapter.fuser_blocks.0.k_norm.weight", "Wan Animate"),
    (WAN, "patch_embedding_pose.weight", "SCAIL or WanDancer"),
    (WAN, "ref_conv.weight", "Wan Fun Control"),
    (WAN, "pose_patch_embedding.weight", "Wan Animate"),
    (WAN, "fps_embedding.weight", "SkyReels V2"),
    (WAN, "blocks.0.audio_cross_attn.q.weight", "HuMo or InfiniteTalk"),
    ("HunyuanVideoTransformer3DModel", "clean_x_embedder.proj.weight", "HunyuanVideo FramePack"),
    ("HunyuanVideoTransformer3DModel", "image_projection.linear_1.weight", "HunyuanVideo FramePack"),
    ("HunyuanVideoTransformer3DModel", "cond_type_embedding.weight", "HunyuanVideo 1.5"),
    ("PixArtTransformer2DModel", "temporal_transformer_blocks.0.attn1.to_q.weight", "Latte"),
    ("PixArtTransformer2DModel", "blocks.0.attn_temp.qkv.weight", "Open-Sora 1.0 or 1.1"),
    ("LTXVideoTransformer3DModel", "keyframes_abs_pos_embedding", "LTX with positions of keyframes"),
    ("ChromaTransformer2DModel", "nerf_blocks.0.norm.scale", "Chroma Radiance"),
    ("FluxTransformer2DModel", "controlnet_blocks.0.weight", "a ControlNet"),
    ("QwenImageTransformer2DModel", "controlnet_x_embedder.weight", "a ControlNet"),
    ("SD3Transformer2DModel", "controlnet_blocks.0.weight", "a ControlNet"),
    ("ZImageTransformer2DModel", "siglip_embedder.0.weight", "Z-Image-Omni"),
]


@pytest.mark.parametrize(("class_name", "name", "message"), OTHER_MODELS)
def test_a_model_with_more_layers_is_another_model(tmp_path, class_name, name, message):
    save_file(weights(class_name) | {name: torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidRequest, match=rf"model.safetensors: the file .*{message}.*ComfyUI's own loader"):
        open_checkpoint(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("class_name", "config", "message"),
    [
        ("AllegroTransformer3DModel", {}, "as Allegro does"),
        ("AnyFlowTransformer3DModel", {}, "the file holds AnyFlow"),
        ("CogView4Transformer2DModel", {}, "the file holds CogView4"),
        ("FluxControlNetModel", {}, "the file holds a ControlNet"),
        ("HunyuanVideoFramepackTransformer3DModel", {"has_clean_x_embedder": True}, "the file holds .* FramePack"),
        (
            "LatteTransformer3DModel",
            {"sample_size": 8, "in_channels": 4, "caption_channels": 24, "patch_size": 2},
            "holds Latte",
        ),
        ("Lumina2Transformer2DModel", {}, "no supported architecture"),
        ("QwenImageControlNetModel", {}, "the file holds a ControlNet"),
        ("SD3ControlNetModel", {}, "the file holds a ControlNet"),
        ("WanAnimateTransformer3DModel", {}, "the file holds Wan Animate"),
        ("WanVACETransformer3DModel", {"vace_layers": [0]}, "the file holds Wan VACE"),
    ],
)
def test_sibling_classes_are_refused(class_name, config, message):
    if not hasattr(diffusers, class_name):
        pytest.skip(f"diffusers {diffusers.__version__} has no {class_name}")
    with torch.device("meta"):
        module = getattr(diffusers, class_name)(**{"num_layers": 1, **config})
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    with pytest.raises(InvalidRequest, match=message):
        recognise(shapes, {}, architectures())


PUBLISHED_LTX = {
    "_class_name": "Transformer3DModel", "activation_fn": "gelu-approximate", "attention_bias": True,
    "attention_head_dim": 4, "caption_channels": 24, "causal_temporal_positioning": True, "cross_attention_dim": 128,
    "in_channels": 20, "norm_eps": 1e-6, "num_attention_heads": 32, "num_layers": 2, "out_channels": 20,
    "positional_embedding_max_pos": [20, 2048, 2048], "positional_embedding_theta": 10000.0,
    "positional_embedding_type": "rope", "qk_norm": "rms_norm", "standardization_norm": "rms_norm",
    "timestep_scale_multiplier": 1000,
}  # fmt: skip
"""What the metadata of published LTX files says, with the sizes of the tiny variant."""


def described(path, class_name, **transformer):
    save_file(weights(class_name), path, {"config": json.dumps({"transformer": transformer})})
    return open_checkpoint(path)


def test_expected_metadata_is_accepted(tmp_path):
    checkpoint = described(tmp_path / "ltx.safetensors", LTX, **PUBLISHED_LTX)
    assert (checkpoint.components, checkpoint.pipeline) == ({"transformer": LTX}, "LTXConditionPipeline")
    wan = {"model_type": "t2v", "patch_size": [1, 2, 2], "window_size": [-1, -1], "eps": 1e-6, "text_len": 512}
    assert described(tmp_path / "wan.safetensors", WAN, **wan).components == {"transformer": WAN}


@pytest.mark.parametrize(
    ("class_name", "name", "value"),
    [
        (LTX, "rope_type", "split"),
        (LTX, "frequencies_precision", "float64"),
        (LTX, "use_middle_indices_grid", True),
        (LTX, "timestep_scale_multiplier", 1),
        (LTX, "positional_embedding_theta", 100.0),
        (LTX, "positional_embedding_max_pos", [20, 1024, 1024]),
        (LTX, "num_attention_heads", 16),
        (LTX, "image_model", "ltxav"),
        (WAN, "causal_ar", True),
        (WAN, "model_type", "flow_rvs"),
        (WAN, "model_type", "animate2"),
        (WAN, "window_size", [3, 3]),
        (WAN, "eps", 1e-5),
        (WAN, "num_heads", 7),
    ],
)
def test_metadata_with_other_settings_is_refused(tmp_path, class_name, name, value):
    with pytest.raises(InvalidRequest, match=rf"model.safetensors: .*{class_name} with {name} .*ComfyUI's own loader"):
        described(tmp_path / "model.safetensors", class_name, **{name: value})
