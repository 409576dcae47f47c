"""The prompts of the families that ComfyUI lacks, against diffusers' own pipelines."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import sentencepiece
import torch
from helpers import tiny_wan
from helpers.custom_cases import CASES, TEXT, encoder
from helpers.inside_fixtures import Loaded, relative_error
from transformers import PreTrainedTokenizerFast

import nodes as core_nodes

PROMPT = "a red circle"
SENTENCES = ["a red circle on a blue background", "a green square moving left", "moving right"]


def pieces() -> bytes:
    """Return a SentencePiece model with T5's special tokens."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 9), model_writer=model, vocab_size=48, hard_vocab_limit=False,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


@pytest.fixture
def load_text(models: Path, load_remote: Callable[..., Loaded]) -> Callable[[str, bool], Loaded]:
    """``load_text(name, spiece)`` loads a case's checkpoint with a text encoder and a tokenizer."""

    def load(name: str, spiece: bool) -> Loaded:
        folder = models / f"{name} with text, {spiece}"
        CASES[name].write(folder)
        encoder().save_pretrained(folder / "text_encoder")
        (folder / "tokenizer").mkdir()
        if spiece:
            (folder / "tokenizer" / "spiece.model").write_bytes(pieces())
        else:
            tiny_wan.tokenizer().save(str(folder / "tokenizer" / "tokenizer.json"))
        index = json.loads((folder / "model_index.json").read_text())
        index |= {"text_encoder": ["transformers", "T5EncoderModel"], "tokenizer": ["transformers", "T5Tokenizer"]}
        (folder / "model_index.json").write_text(json.dumps(index))
        return load_remote(name=folder.name)

    return load


def encoded(loaded: Loaded, text: str) -> torch.Tensor:
    """Run ComfyUI's CLIPTextEncode node."""
    embeds: torch.Tensor = core_nodes.CLIPTextEncode().encode(loaded.clip, text)[0][0][0]
    return embeds


def tokenizer(loaded: Loaded) -> PreTrainedTokenizerFast:
    file = loaded.model.model.diffusion_model.handle.checkpoint.path / "tokenizer" / "tokenizer.json"
    return PreTrainedTokenizerFast(tokenizer_file=str(file), pad_token="<pad>", eos_token="</s>")


@pytest.mark.parametrize("text", [PROMPT, ""])
def test_cogvideox_attends_to_its_padding(load_text: Callable[..., Any], text: str) -> None:
    loaded = load_text("cogvideox 2b" if text else "cogvideox 5b", False)
    pipeline = diffusers.CogVideoXPipeline(
        tokenizer=tokenizer(loaded), text_encoder=encoder(), vae=None, transformer=None, scheduler=None
    )
    reference = pipeline._get_t5_prompt_embeds(text, max_sequence_length=TEXT[0])
    ours = encoded(loaded, text)
    assert ours.shape == (1, *TEXT)
    assert relative_error(ours, reference) < 1e-5


def test_latte_does_not_pad(load_text: Callable[..., Any]) -> None:
    loaded = load_text("latte", False)
    pipeline = diffusers.LattePipeline(
        tokenizer=tokenizer(loaded), text_encoder=encoder(), vae=None, transformer=None, scheduler=None
    )
    reference, _ = pipeline.encode_prompt(PROMPT, do_classifier_free_guidance=False, device="cpu")
    ours = encoded(loaded, PROMPT)
    assert ours.shape == reference.shape == (1, 4, TEXT[1])
    assert relative_error(ours, reference) < 1e-5


def test_sentencepiece_is_read_without_another_tokenizer(load_text: Callable[..., Any]) -> None:
    loaded = load_text("latte", True)
    words = sentencepiece.SentencePieceProcessor(model_proto=pieces(), add_eos=True).encode(PROMPT)
    assert [pair[0] for pair in loaded.clip.tokenize(PROMPT)["t5xxl"][0]] == words
    reference = encoder()(torch.tensor([words])).last_hidden_state
    assert relative_error(encoded(loaded, PROMPT), reference) < 1e-5
