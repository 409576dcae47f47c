"""What training relies on: the code of the latents, the cheap treatment of text padding, held-out triples, Muon."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan, WanPipeline
from diffusers.models.transformers import transformer_wan
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoTokenizer

from training.captions import new_tokenizer, training_caption
from training.codec import shapes_codec
from training.data import Bucket, random_clip, random_latents
from training.export import LARGEST_BYTES
from training.muon import orthogonalize
from training.networks import encode_text, new_text_encoder, new_transformer, padding_bias, share_padding
from training.scenes import held_out, random_scene
from training.train_vae import decoder_loss, encoder_loss, new_vae, speed_up_stills


@torch.no_grad()
def test_one_padding_position_counts_for_all() -> None:
    torch.manual_seed(0)
    transformer, encoder = new_transformer().eval(), new_text_encoder().eval()
    text = new_tokenizer()(["", "a red circle on a blue background"], padding=True, return_tensors="pt")
    ids, mask = pad(text.input_ids, (0, 1)), pad(text.attention_mask, (0, 1))
    embeds = encode_text(encoder, ids, mask)
    latent, timestep = torch.randn(2, 16, 2, 8, 6), torch.tensor([300.0, 900.0])
    (stock,) = transformer(latent, timestep, pad(embeds, (0, 0, 0, 512 - embeds.shape[1])), return_dict=False)
    share_padding(transformer).bias = padding_bias(mask)
    (cheap,) = transformer(latent, timestep, embeds, return_dict=False)
    assert (cheap - stock).abs().max() <= 1e-5 * stock.abs().max()


@torch.no_grad()
@pytest.mark.parametrize(("head", "offset"), [(2, -1), (0, 1)])
def test_two_heads_attend_to_the_same_place_in_adjacent_frames(
    monkeypatch: pytest.MonkeyPatch, head: int, offset: int
) -> None:
    torch.manual_seed(0)
    seen: list[Tensor] = []
    attend = transformer_wan.dispatch_attention_fn

    def spy(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        seen.append(torch.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5)
        return attend(query, key, value, **options)

    monkeypatch.setattr(transformer_wan, "dispatch_attention_fn", spy)
    new_transformer()(torch.randn(1, 16, 4, 10, 8), torch.tensor([900.0]), torch.randn(1, 512, 64))
    frames, places = 4, 5 * 4
    weights = seen[0][0, head].softmax(-1).view(frames, places, frames, places)
    for frame in range(frames):
        if 0 <= frame + offset < frames:
            same_place = weights[frame, :, frame + offset].diagonal()
            assert same_place.min() > 0.5, (frame, same_place)


def scenes(seed: int, count: int) -> Tensor:
    """Draw stills ``[count, 3, 1, 96, 160]`` in -1..1 on which the code was not fitted."""
    rng, bucket = random.Random(seed), Bucket(frames=1, height=96, width=160, weight=1.0)
    return torch.stack([random_clip(rng, bucket)[1] for _ in range(count)])


def test_the_code_keeps_the_picture_in_latents_of_usual_size() -> None:
    pixels = scenes(3, 64)
    code = shapes_codec().encode(pixels)
    assert (shapes_codec().decode(code) - pixels).square().mean() < 0.004
    assert 0.7 < code.square().mean() < 1.4
    deviations = code.std((0, 2, 3, 4))
    assert deviations[:3].min() > 1.5 * deviations[3:].max(), "the three that hold the colour are the largest"
    assert deviations[3:].max() < 1.0


def test_the_code_of_a_clip_is_that_of_every_fourth_frame() -> None:
    bucket = Bucket(frames=9, height=64, width=80, weight=1.0)
    _, pixels = random_clip(random.Random(0), bucket)
    latents, _ = random_latents(random.Random(0), bucket, 1)
    assert latents.shape == (1, 16, 3, 8, 10)
    torch.testing.assert_close(latents, shapes_codec().encode(pixels[None]))


@torch.no_grad()
def test_cheaper_stills_equal_the_stock_computation() -> None:
    torch.manual_seed(0)
    vae = new_vae().eval()
    pixels = torch.rand(2, 3, 5, 32, 32) * 2 - 1
    stock = vae.encode(pixels).latent_dist.mode()
    speed_up_stills(vae)
    torch.testing.assert_close(vae.encode(pixels).latent_dist.mode(), stock, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_shipped_vae_uses_the_code(pipeline: WanPipeline) -> None:
    vae: AutoencoderKLWan = pipeline.vae
    stock = AutoencoderKLWan(base_dim=8, num_res_blocks=1).config
    assert list(vae.config.latents_mean) == list(stock.latents_mean)
    assert list(vae.config.latents_std) == list(stock.latents_std)
    assert encoder_loss(vae, scenes(4, 8)) < 0.05
    assert decoder_loss(vae, scenes(4, 8)) < 0.003


def test_held_out_triples_are_never_drawn() -> None:
    rng = random.Random(0)
    drawn = {(s.shape, s.colour, s.background) for s in (random_scene(rng, moving=False) for _ in range(5000))}
    assert drawn.isdisjoint(held_out())
    assert len(drawn) == 6 * 8 * 7 - 64


def test_no_training_caption_has_an_unknown_word() -> None:
    tokenizer, rng = new_tokenizer(), random.Random(0)
    captions = [training_caption(rng, random_scene(rng, moving=i % 2 == 0)) for i in range(500)]
    assert "" in captions
    assert all(tokenizer.unk_token_id not in tokenizer(caption).input_ids for caption in captions)


def test_orthogonalize_brings_singular_values_near_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(48, 20)))
    assert values.min() > 0.5
    assert values.max() < 1.5


def test_the_pipeline_is_small_and_its_tokenizer_is_the_trained_one(shapes_folder: Path) -> None:
    assert sum(file.stat().st_size for file in shapes_folder.rglob("*") if file.is_file()) <= LARGEST_BYTES
    assert not list(shapes_folder.rglob("*.bin"))
    shipped = AutoTokenizer.from_pretrained(shapes_folder / "tokenizer")
    for prompt in ("", "A red circle, moving left on a BLUE background"):
        assert shipped(prompt).input_ids == new_tokenizer()(prompt).input_ids


@pytest.mark.parametrize("length", [1, 9])
def test_padding_bias_weighs_the_padding(length: int) -> None:
    mask = torch.zeros(1, 12, dtype=torch.long)
    mask[:, :length] = 1
    weights = padding_bias(mask)[0, 0, 0].exp()
    assert weights.sum() == pytest.approx(512)
    assert weights[length].item() == pytest.approx(512 - length)
