"""Every VAE class against diffusers' decode and encode: tiny random modules, odd sizes, a batch of 2.

In float64, because random layers with few channels amplify rounding, and the tests ask whether the computation is the
same.
"""

import inspect
import json

import diffusers
import pytest
import torch
from einops import rearrange

from lab.verify.vae import stock as vae_stock
from parallel_backend.autoencoder import codec
from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.errors import Cancelled, InvalidRequest
from parallel_backend.protocol.messages import Decode, Encode
from parallel_backend.vaes import VAES, LatentScale, Scaling, module_class_of, vae_of
from tests.unit.autoencoder import vae_examples
from tests.unit.autoencoder.vae_examples import CONFIGS
from tests.unit.conftest import one_rank

SIZE = (3, 5)
VIDEOS = [name for name in CONFIGS if name not in ("image", "flux2")]
CASES = [("image", None), ("flux2", None), *((name, frames) for name in VIDEOS for frames in (1, 5)), ("cogvideox", 4)]


@pytest.fixture(autouse=True)
def without_gradients():
    """Run without autograd, as the engine does."""
    with torch.inference_mode():
        yield


CLIPS = ("minimax_h3",)
"""VAEs that code clips of other numbers of frames; test_minimax_h3.py encodes with them."""


def build(name):
    """Return the tiny module of that name, in float64."""
    return vae_examples.build(name).double()


COMFYUI_DIFFERS = ("ltx", "ltx_noisy", "ltx2", "mochi")
"""VAEs whose decoder ``prepare`` changes to ComfyUI's; tests/inside_comfyui compares these with ComfyUI."""


FILLS_UP = ("open_sora1",)
"""VAEs that encode all frames of a video, whatever their number."""


def prepared_vae(name, module):
    """Return the VAE of a module, and prepare the module as after loading unless that departs from diffusers."""
    vae = VAES[CONFIGS[name][0]](dict(module.config))
    if name not in COMFYUI_DIFFERS:
        vae.prepare(module)
    return vae


def latent_for(vae, frames, batch=2):
    """Return random latents."""
    dims = SIZE if frames is None else (frames, *SIZE)
    return torch.randn(batch, vae.scale.channels, *dims, generator=torch.Generator().manual_seed(1)).double()


def ignore(done, total):
    """Ignore progress."""


def stock(name):
    """Return diffusers' module, set to process a whole video at once."""
    module = build(name)
    module.use_framewise_encoding = module.use_framewise_decoding = False
    return module


@pytest.mark.parametrize(("name", "frames"), CASES)
@pytest.mark.daily(9)
def test_decode_equals_diffusers(name, frames):
    module = build(name)
    vae = prepared_vae(name, module)
    latent = latent_for(vae, frames)
    pixels = codec.decode(vae, module, latent, ignore)
    expected = ((vae_stock.decode(stock(name), latent) + 1) / 2).clamp(0, 1).movedim(1, -1)
    assert pixels.dtype == torch.float32
    assert expected.std() > 0.05
    torch.testing.assert_close(pixels, expected.float(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "groups"), [("image", None), ("flux2", None), *((name, 2) for name in VIDEOS if name not in CLIPS)]
)
@pytest.mark.daily(5)
def test_encode_equals_diffusers_and_drops_frames_that_fill_no_latent_frame(name, groups):
    module = build(name)
    vae = prepared_vae(name, module)
    encoded_frames = 1 + (groups or 0) * vae.scale.temporal
    dims = tuple(size * vae.scale.spatial for size in SIZE)
    pixels = torch.rand(2, *(() if groups is None else (encoded_frames + vae.scale.temporal - 1,)), *dims, 3).double()
    latent = codec.encode(vae, module, pixels, ignore)
    used = pixels if groups is None or name in FILLS_UP else pixels[:, :encoded_frames]
    expected = vae_stock.encode(stock(name), used.movedim(-1, 1) * 2 - 1)
    assert latent.shape == (2, vae.scale.channels, *(() if groups is None else (groups + 1,)), *SIZE)
    torch.testing.assert_close(latent, expected.float(), atol=1e-5, rtol=1e-5)


def test_an_image_vae_processes_a_video_frame_by_frame():
    module = build("image")
    vae = prepared_vae("image", module)
    latent = torch.randn(2, 4, 3, *SIZE).double()
    pixels = codec.decode(vae, module, latent, ignore)
    frames = module.decode(rearrange(latent, "b c t h w -> (b t) c h w")).sample
    expected = rearrange(((frames + 1) / 2).clamp(0, 1), "(b t) c h w -> b t h w c", b=2)
    torch.testing.assert_close(pixels, expected.float(), atol=1e-6, rtol=0)
    encoded = codec.encode(vae, module, pixels, ignore)
    for i in range(3):
        torch.testing.assert_close(encoded[:, :, i], codec.encode(vae, module, pixels[:, i], ignore))


def convolutions(module):
    return sum(isinstance(layer, torch.nn.Conv2d | torch.nn.Conv3d) for layer in module.modules())


@pytest.mark.parametrize(("frames", "latents"), [(1, 1), (4, 1), (5, 2), (17, 5), (18, 6), (19, 6), (34, 10), (51, 15)])
def test_open_sora_shortens_each_17_frames_to_5(frames, latents):
    module = build("open_sora1")
    vae = prepared_vae("open_sora1", module)
    pixels = torch.rand(1, frames, 16, 8, 3).double()
    latent = codec.encode(vae, module, pixels, ignore)
    assert latent.shape == (1, 4, latents, 2, 1)
    rest = latents % 5
    assert vae.pixel_frames(latents) == latents // 5 * 17 + (4 * rest - 3 if rest else 0)
    assert codec.decode(vae, module, latent.double(), ignore).shape[1] == vae.pixel_frames(latents)
    first = codec.encode(vae, module, pixels[:, :17], ignore)
    torch.testing.assert_close(latent[:, :, :5], first, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.daily(5)
def test_progress_counts_units_and_may_stop_the_work(name):
    module, framewise = build(name), {"wan21": 5, "wan22": 5, "qwen_image": 5, "cogvideox": 2, "open_sora1": 17}
    framewise |= {"minimax_h3": 1}
    vae, progress = prepared_vae(name, module), []
    latent = latent_for(vae, (5 if name in framewise else 2) if vae.scale.video else None)
    units = framewise[name] if name in framewise else convolutions(module.decoder)
    pixels = codec.decode(vae, module, latent, lambda *values: progress.append(values))
    assert progress == [(i + 1, 2 * units) for i in range(2 * units)]

    def cancel(done, total):
        raise Cancelled("enough")

    with pytest.raises(Cancelled):
        codec.decode(vae, module, latent, cancel)
    with pytest.raises(Cancelled):
        codec.encode(vae, module, pixels, cancel)
    torch.testing.assert_close(codec.decode(vae, module, latent, ignore), pixels, atol=0, rtol=0)
    progress.clear()
    codec.encode(vae, module, pixels, lambda *values: progress.append(values))
    total = len(latent) * vae.encode_progress_units(module, pixels.shape[1])
    assert total == 2 * units if name in framewise else total > 2 * 10
    assert progress == [(i + 1, total) for i in range(total)]


def test_decoder_noise_is_the_same_for_every_sample_and_leaves_the_generator_alone():
    module = build("ltx_noisy")
    vae = prepared_vae("ltx_noisy", module)
    latent = latent_for(vae, 1)[:1].expand(2, -1, -1, -1, -1)
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first, second = codec.decode(vae, module, latent, ignore)
    assert torch.equal(first, second)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("class_name", VAES)
def test_missing_config_entries_take_diffusers_defaults(class_name):
    signature = inspect.signature(module_class_of(class_name).__init__)
    defaults = {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    vae, full = VAES[class_name]({}), VAES[class_name](defaults)
    assert (vae.scale, vae.scaling, vae.colors) == (full.scale, full.scaling, full.colors)


@pytest.mark.parametrize(
    ("class_name", "config", "scale"),
    [
        (
            "AutoencoderKLWan",
            {"z_dim": 48, "patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16},
            LatentScale(channels=48, spatial=16, temporal=4),
        ),
        (
            "AutoencoderKL",
            {"latent_channels": 16, "block_out_channels": [128, 256, 512, 512]},
            LatentScale(channels=16, spatial=8, video=False),
        ),
        ("AutoencoderKLFlux2", {}, LatentScale(channels=128, spatial=16, video=False)),
        ("AutoencoderKLLTXVideo", {}, LatentScale(channels=128, spatial=32, temporal=8)),
        (
            "AutoencoderKLLTXVideo",
            {
                "spatio_temporal_scaling": [True] * 4,
                "spatial_compression_ratio": 32,
                "temporal_compression_ratio": 8,
            },
            LatentScale(channels=128, spatial=32, temporal=8),
        ),
        ("AutoencoderKLMochi", {}, LatentScale(channels=12, spatial=8, temporal=6)),
    ],
)
def test_shapes_of_published_vaes(class_name, config, scale):
    assert VAES[class_name](config).scale == scale
    assert VAES[class_name](config).colors == 3


def test_scaling_between_latent_and_model():
    flux = {"scaling_factor": 0.3611, "shift_factor": 0.1159}
    assert VAES["AutoencoderKL"](flux).scaling == Scaling(factor=0.3611, shift=0.1159)
    assert VAES["AutoencoderKL"]({"shift_factor": None}).scaling == Scaling(factor=0.18215)
    wan = VAES["AutoencoderKLWan"]({"latents_mean": [1.0], "latents_std": [2.0]})
    assert wan.scaling == Scaling(mean=(1.0,), std=(2.0,))
    assert VAES["AutoencoderKLFlux2"]({}).scaling is None
    with pytest.raises(InvalidRequest, match="1 latents_mean and 2 latents_std"):
        _ = VAES["AutoencoderKLWan"]({"latents_mean": [1.0], "latents_std": [2.0, 3.0]}).scaling


@pytest.fixture
def image_checkpoint(tmp_path):
    """A checkpoint with an image VAE, and only the name of a transformer."""
    (tmp_path / "model_index.json").write_text(
        json.dumps({"transformer": ["diffusers", "FluxTransformer2DModel"], "vae": ["diffusers", "AutoencoderKL"]})
    )
    vae_examples.build("image").save_pretrained(tmp_path / "vae")
    return tmp_path


def rewrite(folder, **changes):
    """Change entries of the VAE's config."""
    file = folder / "vae" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_images_through_the_engine(ask, image_checkpoint):
    pixels = ask(Decode(model=one_rank(image_checkpoint)), {"latent": torch.zeros(2, 4, *SIZE)})["pixels"]
    assert pixels.shape == (2, 24, 40, 3)
    assert ask(Encode(model=one_rank(image_checkpoint)), {"pixels": pixels})["latent"].shape == (2, 4, *SIZE)
    with pytest.raises(InvalidRequest, match="latent of 4 or 5 dims"):
        ask(Decode(model=one_rank(image_checkpoint)), {"latent": torch.zeros(2, 4, 3)})
    with pytest.raises(InvalidRequest, match=r"\[1, 20, 16, 3\].*multiples of 8"):
        ask(Encode(model=one_rank(image_checkpoint)), {"pixels": torch.zeros(1, 20, 16, 3)})


def test_a_temporal_decoder_through_the_engine(ask, tmp_path):
    index = {"transformer": ["diffusers", "LatteTransformer3DModel"], "vae": ["diffusers", CONFIGS["temporal"][0]]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    vae_examples.build("temporal").save_pretrained(tmp_path / "vae")
    pixels = ask(Decode(model=one_rank(tmp_path)), {"latent": torch.zeros(2, 4, 3, *SIZE)})["pixels"]
    assert pixels.shape == (2, 3, 24, 40, 3)
    assert ask(Encode(model=one_rank(tmp_path)), {"pixels": pixels})["latent"].shape == (2, 4, 3, *SIZE)


def test_other_than_rgb_is_refused(image_checkpoint):
    rewrite(image_checkpoint, in_channels=4, out_channels=4)
    with pytest.raises(InvalidRequest, match="has a VAE with 4 colour channels; only RGB"):
        vae_of(open_checkpoint(image_checkpoint))


def test_hunyuan_video_builds_no_mask_over_all_pairs(monkeypatch):
    def refuse(*_args, **_options):
        raise AssertionError("a mask of (T H W) ** 2 values")

    file = inspect.getmodule(diffusers.AutoencoderKLHunyuanVideo)
    monkeypatch.setattr(file, "prepare_causal_attention_mask", refuse)
    module = build("hunyuan_video")
    vae = prepared_vae("hunyuan_video", module)
    assert codec.encode(vae, module, codec.decode(vae, module, latent_for(vae, 2), ignore), ignore).shape[2] == 2
    with pytest.raises(AssertionError, match="a mask of"):
        stock("hunyuan_video").decode(latent_for(vae, 2))


@pytest.mark.parametrize(("ratio", "words"), [(6, "gave 25 frames, .* promises 37"), (2, "gives pixels of shape")])
def test_a_config_that_does_not_match_the_weights_is_refused(ratio, words):
    module = build("hunyuan_video")
    vae = VAES["AutoencoderKLHunyuanVideo"](dict(module.config) | {"temporal_compression_ratio": ratio})
    vae.prepare(module)
    with pytest.raises(InvalidRequest, match=words):
        codec.decode(vae, module, latent_for(vae, 7, batch=1), ignore)
