"""VAEs in one safetensors file: which class and config follow from names, shapes and metadata, and what is refused."""

import json
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import save_file

from parallel_backend.checkpoint.architectures import VAES, architecture_of, recognise
from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.errors import InvalidRequest
from parallel_backend.loading.load import load_vae
from parallel_backend.loading.row_map import converted
from parallel_backend.vaes import module_class_of, vae_of
from tests.unit.autoencoder.vae_examples import CONFIGS as EXAMPLES

GROUPS: dict[str, Any] = {"block_out_channels": [32, 32, 64, 64], "layers_per_block": 1, "latent_channels": 4}
IMAGE = GROUPS | {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
KL = "AutoencoderKL"
OPEN_SORA1: dict[str, Any] = {
    "block_out_channels": [32, 64, 64, 64], "layers_per_block": 1, "filters": 32, "num_res_blocks": 2,
    "channel_multipliers": [1, 2, 2, 3], "temporal_downsample": [True, False, True], "embed_dim": 6,
}  # fmt: skip
MINIMAX_H3: dict[str, Any] = {
    "block_out_channels": [32, 32, 64, 32, 32, 64], "layers_per_block": 1, "decoder_num_layers": 2,
    "decoder_num_attention_heads": 3, "decoder_num_register_tokens": 2, "decoder_ffn_mult": 2,
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    name: EXAMPLES[name] for name in ("wan21", "wan22", "ltx", "ltx_noisy", "ltx2", "mochi")
} | {
    "image": (KL, IMAGE),
    "flux": (KL, IMAGE | {"use_quant_conv": False, "use_post_quant_conv": False}),
    "flux2": ("AutoencoderKLFlux2", IMAGE),
    "hunyuan_video": ("AutoencoderKLHunyuanVideo", GROUPS),
    "cogvideox": ("AutoencoderKLCogVideoX", GROUPS),
    "minimax_h3": ("AutoencoderKLMiniMaxH3", MINIMAX_H3),
    "open_sora1": ("VideoAutoencoderPipeline", OPEN_SORA1),
}
SCALING = ("scaling_factor", "shift_factor", "latents_mean", "latents_std")


def write(path, name, metadata=None, **changes):
    """Write a file in diffusers' names and open it. A change of None drops the weight."""
    class_name, config = CONFIGS[name]
    torch.manual_seed(0)
    module = module_class_of(class_name)(**config)
    weights = {key: each for key, each in (dict(module.state_dict()) | changes).items() if each is not None}
    save_file(weights, str(path), metadata=metadata)
    return module, open_checkpoint(path)


@pytest.mark.parametrize("name", CONFIGS)
def test_class_and_config_follow_from_names_and_shapes(tmp_path, name):
    module, checkpoint = write(tmp_path / "vae.safetensors", name)
    assert checkpoint.components == {"vae": type(module).__name__}
    found = {key: value for key, value in checkpoint.config("vae").items() if key not in SCALING}
    assert CONFIGS[name][1].keys() - found.keys() - set(SCALING) == set()
    known = {key: module.config[key] for key in found if module.config[key] is not None}
    expected = {key: list(value) if isinstance(value, tuple) else value for key, value in known.items()}
    assert {key: found[key] for key in known} == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_loaded(tmp_path, name):
    module, checkpoint = write(tmp_path / "vae.safetensors", name)
    loaded = load_vae(checkpoint, torch.device("cpu")).state_dict()
    assert loaded.keys() == module.state_dict().keys()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in module.state_dict().items())


@pytest.mark.parametrize("name", ["wan21", "wan22", "mochi", "image", "flux", "hunyuan_video", "cogvideox"])
def test_a_file_has_no_scaling(tmp_path, name):
    _, checkpoint = write(tmp_path / "vae.safetensors", name)
    assert vae_of(checkpoint).scaling is None


def test_a_1x1_convolution_becomes_a_linear_layer(tmp_path):
    key = "decoder.mid_block.attentions.0.to_q.weight"
    weight = torch.randn(64, 64)
    _, checkpoint = write(tmp_path / "vae.safetensors", "image", **{key: weight.reshape(64, 64, 1, 1)})
    assert torch.equal(load_vae(checkpoint, torch.device("cpu")).state_dict()[key], weight)


def test_former_names_of_diffusers(tmp_path):
    former = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    module = diffusers.AutoencoderKL(**IMAGE)
    weights = {}
    for name, tensor in module.state_dict().items():
        layer = next((each for each in former if f".{each}." in name), None)
        weights[name.replace(layer, former[layer]) if layer else name] = tensor
    save_file(weights, str(tmp_path / "vae.safetensors"))
    loaded = load_vae(open_checkpoint(tmp_path / "vae.safetensors"), torch.device("cpu")).state_dict()
    assert loaded.keys() == module.state_dict().keys()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in module.state_dict().items())


@pytest.mark.parametrize(
    ("class_name", "names"),
    [
        (KL, {
            "encoder.down.0.block.1.norm1.weight": "encoder.down_blocks.0.resnets.1.norm1.weight",
            "encoder.down.1.downsample.conv.bias": "encoder.down_blocks.1.downsamplers.0.conv.bias",
            "decoder.up.3.block.0.nin_shortcut.weight": "decoder.up_blocks.0.resnets.0.conv_shortcut.weight",
            "decoder.up.1.upsample.conv.weight": "decoder.up_blocks.2.upsamplers.0.conv.weight",
            "decoder.mid.attn_1.norm.weight": "decoder.mid_block.attentions.0.group_norm.weight",
            "decoder.mid.attn_1.proj_out.weight": "decoder.mid_block.attentions.0.to_out.0.weight",
            "decoder.mid.block_2.conv1.weight": "decoder.mid_block.resnets.1.conv1.weight",
            "decoder.norm_out.weight": "decoder.conv_norm_out.weight",
            "decoder.post_quant_conv.weight": "post_quant_conv.weight",
        }),
        ("AutoencoderKLWan", {
            "conv1.weight": "quant_conv.weight", "decoder.conv1.weight": "decoder.conv_in.weight",
            "decoder.upsamples.2.residual.6.weight": "decoder.up_blocks.0.resnets.2.conv2.weight",
            "decoder.upsamples.3.resample.1.weight": "decoder.up_blocks.0.upsamplers.0.resample.1.weight",
            "decoder.upsamples.4.shortcut.weight": "decoder.up_blocks.1.resnets.0.conv_shortcut.weight",
            "encoder.downsamples.5.time_conv.bias": "encoder.down_blocks.5.time_conv.bias",
            "encoder.middle.1.to_qkv.weight": "encoder.mid_block.attentions.0.to_qkv.weight",
        }),
        ("AutoencoderKLWan", {
            "decoder.upsamples.0.upsamples.3.time_conv.weight": "decoder.up_blocks.0.upsampler.time_conv.weight",
            "decoder.upsamples.0.upsamples.2.residual.0.gamma": "decoder.up_blocks.0.resnets.2.norm1.gamma",
            "encoder.downsamples.1.downsamples.2.resample.1.bias": "encoder.down_blocks.1.downsampler.resample.1.bias",
        }),
        ("AutoencoderKLMochi", {
            "encoder.layers.0.weight": "encoder.proj_in.weight",
            "encoder.layers.1.stack.2.weight": "encoder.block_in.resnets.0.conv1.conv.weight",
            "encoder.layers.2.layers.0.weight": "encoder.down_blocks.0.conv_in.conv.weight",
            "encoder.layers.2.layers.2.attn_block.norm.bias": "encoder.down_blocks.0.norms.1.norm_layer.bias",
            "encoder.layers.3.attn_block.attn.out.bias": "encoder.block_out.attentions.0.to_out.0.bias",
            "decoder.blocks.0.0.bias": "decoder.conv_in.bias",
            "decoder.blocks.0.2.stack.5.bias": "decoder.block_in.resnets.1.conv2.conv.bias",
            "decoder.blocks.1.proj.weight": "decoder.up_blocks.0.proj.weight",
            "decoder.blocks.1.blocks.0.stack.3.bias": "decoder.up_blocks.0.resnets.0.norm2.norm_layer.bias",
            "decoder.blocks.2.1.stack.0.bias": "decoder.block_out.resnets.1.norm1.norm_layer.bias",
            "encoder.output_norm.bias": "encoder.norm_out.norm_layer.bias",
        }),
        ("AutoencoderKLLTXVideo", {
            "encoder.down_blocks.0.res_blocks.0.conv1.conv.bias": "encoder.down_blocks.0.resnets.0.conv1.conv.bias",
            "encoder.down_blocks.1.conv.bias": "encoder.down_blocks.0.downsamplers.0.conv.bias",
            "encoder.down_blocks.2.conv1.conv.bias": "encoder.down_blocks.0.conv_out.conv1.conv.bias",
            "encoder.down_blocks.3.res_blocks.0.conv1.conv.bias": "encoder.mid_block.resnets.0.conv1.conv.bias",
            "decoder.up_blocks.0.res_blocks.0.conv1.conv.bias": "decoder.mid_block.resnets.0.conv1.conv.bias",
            "decoder.up_blocks.1.conv.conv.bias": "decoder.up_blocks.0.upsamplers.0.conv.conv.bias",
            "decoder.up_blocks.2.res_blocks.0.conv1.conv.bias": "decoder.up_blocks.0.resnets.0.conv1.conv.bias",
            "decoder.up_blocks.3.conv_shortcut.weight": "decoder.up_blocks.1.conv_in.conv_shortcut.conv.weight",
            "decoder.up_blocks.3.conv1.conv.weight": "decoder.up_blocks.1.conv_in.conv1.conv.weight",
            "decoder.last_scale_shift_table": "decoder.scale_shift_table",
            "per_channel_statistics.std-of-means": "latents_std",
        }),
    ],
    ids=["ldm", "wan21", "wan22", "mochi", "ltx"],
)  # fmt: skip
def test_original_names(class_name, names):
    rows = converted(dict.fromkeys(names, (2,)), architecture_of(class_name).to_diffusers)
    assert {each.source: new for new, each in rows.items()} == names


def test_statistics_without_use_are_left_out():
    tensors = {"per_channel_statistics.mean-of-stds": torch.zeros(128)}
    assert architecture_of("AutoencoderKLLTXVideo").to_diffusers(tensors) == {}


def refused(message, path, name, metadata=None, **changes):
    """Assert that a file with changed weights is refused."""
    with pytest.raises(InvalidRequest, match=message):
        write(path, name, metadata, **changes)


def test_an_unknown_vae_is_refused(tmp_path):
    save_file({"decoder.1.weight": torch.zeros(4), "decoder.22.bias": torch.zeros(3)}, str(tmp_path / "taew.sft"))
    with pytest.raises(InvalidRequest, match=r"taew.sft: the weights belong to no supported architecture; supported: "):
        open_checkpoint(tmp_path / "taew.sft")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("decoder.mid.block_1.mix_factor", "holds Stable Video Diffusion's VAE .* not supported"),
        ("quantize.embedding.weight", "holds a VQ model"),
        ("encoder.down.3.attn.0.norm.weight", "holds a VAE with attention at several levels"),
    ],
)
def test_relatives_of_autoencoder_kl_are_refused(tmp_path, extra, message):
    refused(message, tmp_path / "vae.safetensors", "image", **{extra: torch.zeros(1)})


def test_a_decoder_of_another_width_is_refused(tmp_path):
    wider = {"decoder.up_blocks.3.resnets.0.conv1.weight": torch.zeros(64, 32, 3, 3)}
    message = r"decoder has widths \[64, 32, 64, 64\], and its encoder \[32, 32, 64, 64\]; they must be the same"
    refused(message, tmp_path / "vae.safetensors", "image", **wider)


MARKS: dict[str, tuple[str, ...]] = {
    "AutoencoderKLLTXVideo": (
        "decoder.up_blocks.0.res_blocks.0.conv1.conv.weight", "encoder.conv_in.conv.weight",
        "per_channel_statistics.std-of-means",
    ),
    "AutoencoderKLMochi": ("encoder.output_proj.weight", "decoder.blocks.0.0.weight", "decoder.output_proj.weight"),
    "AutoencoderKLWan": ("decoder.middle.0.residual.0.gamma", "encoder.conv1.weight", "decoder.head.0.gamma"),
}  # fmt: skip
"""Original names by which files are recognised."""


@pytest.mark.parametrize(
    ("class_name", "name", "columns", "message"),
    [
        ("AutoencoderKLLTXVideo", "decoder.up_blocks.2.conv.conv.weight", 8, "'decoder.up_blocks.1'"),
        ("AutoencoderKLLTXVideo", "encoder.down_blocks.1.conv.weight", 8, "'encoder.down_blocks.0'"),
        ("AutoencoderKLLTXVideo", "decoder.up_blocks.x.conv.weight", 8, "'x'"),
        ("AutoencoderKLLTXVideo", "encoder.conv_in.conv.weight", 10**400, "too large"),
        ("AutoencoderKLMochi", "decoder.blocks.0.proj.weight", 8, "'proj'"),
        ("AutoencoderKLWan", f"decoder.upsamples.{'9' * 5000}.residual.2.weight", 8, "5000 digits"),
    ],
)
def test_names_and_shapes_that_no_vae_has_are_refused_in_one_sentence(class_name, name, columns, message):
    shapes = dict.fromkeys(MARKS[class_name], (8, 8, 3, 3, 3)) | {name: (8, columns)}
    with pytest.raises(InvalidRequest, match=f"looks like {class_name}, but lacks a weight .*{message}"):
        recognise(shapes, {}, VAES)


def test_other_than_rgb_is_refused_by_the_files_name(tmp_path):
    layer = {"decoder.conv_out.weight": torch.zeros(12, 32, 3, 3), "decoder.conv_out.bias": torch.zeros(12)}
    _, checkpoint = write(tmp_path / "up2x.safetensors", "image", **layer)
    with pytest.raises(InvalidRequest, match=r"^up2x.safetensors has a VAE with 12 colour channels; only RGB"):
        vae_of(checkpoint)


def test_half_a_vae_is_refused(tmp_path):
    lacking = {"encoder.conv_in.weight": None}
    message = r"looks like AutoencoderKL, but lacks a weight .*'encoder.conv_in.weight'"
    refused(message, tmp_path / "vae.safetensors", "image", **lacking)


def ltx_metadata(**vae):
    """Return the metadata of an LTX file."""
    full = {"dims": 3, "norm_layer": "pixel_norm", "latent_log_var": "uniform"} | vae
    return {"config": json.dumps({"vae": full})}


def test_ltx_metadata_says_what_shapes_do_not(tmp_path):
    up = [["res_x", 1], ["compress_all", {"residual": True, "multiplier": 2}]]
    plain = [["res_x", 1], ["compress_all", {"multiplier": 2}]]
    metadata = ltx_metadata(decoder_blocks=[*up, *plain, *up, ["res_x", 1]], spatial_padding_mode="replicate")
    _, checkpoint = write(tmp_path / "vae.safetensors", "ltx_noisy", metadata)
    config = checkpoint.config("vae")
    assert config["upsample_residual"] == [True, False, True]
    assert config["_spatial_padding_mode"] == "replicate"
    module = load_vae(checkpoint, torch.device("cpu"))
    assert {layer.padding_mode for layer in module.modules() if hasattr(layer, "padding_mode")} == {"replicate"}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"vae": 3}', '{"transformer": {}}'])
def test_metadata_without_a_vae_says_nothing(tmp_path, text):
    _, checkpoint = write(tmp_path / "vae.safetensors", "ltx_noisy", {"config": text})
    assert checkpoint.config("vae")["upsample_residual"] == [True, True, True]


@pytest.mark.parametrize(
    ("vae", "message"),
    [
        ({"norm_layer": "group_norm"}, "LTX VAE with norm_layer 'group_norm', which is not supported"),
        ({"causal_decoder": True}, "with causal_decoder True"),
        ({"decoder_blocks": [["attn_res_x", {}]]}, "with attn_res_x in decoder_blocks"),
        ({"encoder_blocks": [["attn_res_x", {}]]}, "with attn_res_x in encoder_blocks"),
    ],
)
def test_ltx_metadata_of_other_layers_is_refused(tmp_path, vae, message):
    refused(message, tmp_path / "vae.safetensors", "ltx_noisy", ltx_metadata(**vae))


@pytest.mark.parametrize("said", [None, False, True])
def test_upsamplings_of_ltx_23_add_their_input_only_if_its_metadata_says_so(tmp_path, said):
    """Those of space or time alone never do, whatever it says."""
    blocks = [
        block
        for kind, factor in (("space", 2), ("time", 2), ("all", 1), ("all", 2))
        for block in (["res_x", 1], [f"compress_{kind}", {"multiplier": factor, "residual": said}])
    ]
    metadata = None if said is None else ltx_metadata(decoder_blocks=[*blocks, ["res_x", 1]])
    _, checkpoint = write(tmp_path / "vae.safetensors", "ltx2", metadata)
    config = checkpoint.config("vae")
    assert config["upsample_type"] == ["spatial", "temporal", "spatiotemporal", "spatiotemporal"]
    assert config["upsample_residual"] == [False, False, bool(said), bool(said)]
    strides = [block.upsamplers[0].stride for block in load_vae(checkpoint, torch.device("cpu")).decoder.up_blocks]
    assert strides == [(2, 2, 2), (2, 2, 2), (2, 1, 1), (1, 2, 2)]


def test_an_upsampling_of_columns_alone_is_refused(tmp_path):
    columns = {"decoder.up_blocks.0.upsamplers.0.conv.conv.weight": torch.zeros(48, 32, 3, 3, 3)}
    refused("doubles neither time nor rows and columns", tmp_path / "vae.safetensors", "ltx_noisy", **columns)


def test_flux2_is_asked_for_before_autoencoder_kl(tmp_path):
    shapes = {name: tuple(tensor.shape) for name, tensor in diffusers.AutoencoderKLFlux2(**IMAGE).state_dict().items()}
    assert recognise(shapes, {}, VAES).class_name == "AutoencoderKLFlux2"
    assert recognise({k: v for k, v in shapes.items() if "bn." not in k}, {}, VAES).class_name == KL
