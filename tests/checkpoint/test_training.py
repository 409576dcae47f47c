"""What the training relies on: the cheap form of padded text, folded statistics, held-out triples, Muon."""

import random
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan, WanPipeline
from torch.nn.functional import pad
from transformers import AutoTokenizer

from training.captions import new_tokenizer, training_caption
from training.export import LARGEST_BYTES
from training.fold import Statistics, fold, measure
from training.muon import orthogonalize
from training.networks import encode_text, new_text_encoder, new_transformer, padding_bias, share_padding
from training.scenes import held_out, random_scene
from training.train_vae import decode_unclamped, new_vae, speed_up_stills


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
def test_folding_sets_the_statistics_and_changes_no_pixel() -> None:
    torch.manual_seed(0)
    vae = new_vae().eval()
    pixels = torch.rand(1, 3, 5, 32, 32) * 2 - 1
    before = decode_unclamped(vae, vae.encode(pixels).latent_dist.mode())
    fold(vae, Statistics(mean=torch.linspace(-2, 2, 16), std=torch.linspace(0.2, 3, 16)))
    after = decode_unclamped(vae, vae.encode(pixels).latent_dist.mode())
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_cheaper_stills_are_the_stock_computation() -> None:
    torch.manual_seed(0)
    vae = new_vae().eval()
    pixels = torch.rand(2, 3, 5, 32, 32) * 2 - 1
    stock = vae.encode(pixels).latent_dist.mode()
    speed_up_stills(vae)
    torch.testing.assert_close(vae.encode(pixels).latent_dist.mode(), stock, rtol=1e-4, atol=1e-5)


def test_shipped_latents_have_wans_statistics(pipeline: WanPipeline) -> None:
    vae: AutoencoderKLWan = pipeline.vae
    measured = measure(vae, scenes=40)
    std = torch.tensor(vae.config.latents_std)
    assert ((measured.mean - torch.tensor(vae.config.latents_mean)) / std).abs().max() < 0.35
    assert (measured.std / std).log().abs().max() < 0.35
    stock = AutoencoderKLWan(base_dim=8, num_res_blocks=1).config
    assert list(vae.config.latents_mean) == list(stock.latents_mean)
    assert list(vae.config.latents_std) == list(stock.latents_std)


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
