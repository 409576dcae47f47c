"""Flux.2's text encoder from a diffusers folder: the tokenizer in Mistral's own format, and ComfyUI's own model."""

import inspect
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import comfy.text_encoders.flux
import comfy.text_encoders.llama
import pytest
import torch
from any_folder_name.nodes.families.flux2 import Flux2
from any_folder_name.nodes.remote.clip import core_clip
from any_folder_name.nodes.remote.mistral_tokenizer import tekken_json
from any_folder_name.parallel_backend.checkpoint.opening import open_checkpoint
from any_folder_name.parallel_backend.errors import InvalidRequest
from helpers.inside_fixtures import relative_error
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.integrations.mistral import MistralConverter

TEXTS = ["the otter's 3 blue boats", "größer, naïve", "\n\tdef f(x): return x"] * 3
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", *(f"[{i}]" for i in range(5, 11)), "<pad>"]
SPECIAL += ["[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
"""Special tokens. Those that ComfyUI uses have their published ids, except the last two."""
START = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
PATTERN = inspect.signature(TikTokenConverter).parameters["pattern"].default
"""How words are split. ComfyUI 0.33 knows no other pattern, whatever the file says."""
WORDS = 320
WIDTH = 5120
"""ComfyUI detects the model by this width."""
SMALL = {"intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
LAYERS = 31
"""One layer more than ComfyUI uses of a model with fewer than 40: transformers normalizes the last one's output."""


def write_tokenizer(folder: Path) -> Tokenizer:
    """Write a small tokenizer of Mistral's kind as diffusers folders have it."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    words = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=SPECIAL, initial_alphabet=alphabet, vocab_size=WORDS)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = START
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def test_the_tokenizer_is_the_same_in_mistrals_own_format(tmp_path: Path) -> None:
    tokenizer, tekken_file = write_tokenizer(tmp_path / "tokenizer"), tmp_path / "tekken.json"
    tekken_file.write_bytes(tekken_json(tmp_path / "tokenizer" / "tokenizer.json"))
    converted_back = MistralConverter(str(tekken_file)).converted()
    for text in ("the otter", "[INST]größer boats 33[/INST]", "\n\n f(x) 你"):
        assert (
            converted_back.encode(text, add_special_tokens=False).ids
            == tokenizer.encode(text, add_special_tokens=False).ids
        )
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="cannot be read as Mistral's tokenizer"):
        tekken_json(tmp_path / "tokenizer" / "tokenizer.json")


def write(folder: Path) -> tuple[Tokenizer, Mistral3ForConditionalGeneration]:
    """Write a Flux.2 folder with a small text encoder and its tokenizer, and return both as transformers' objects."""
    torch.manual_seed(0)
    config = Mistral3Config(
        text_config={
            "model_type": "mistral", "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "vocab_size": WORDS,
            "rms_norm_eps": 1e-5, "rope_theta": 1e9, **SMALL,
        },
        vision_config={
            "model_type": "pixtral", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 1,
        },
    )  # fmt: skip
    encoder = Mistral3ForConditionalGeneration(config).eval().requires_grad_(False)
    encoder.save_pretrained(folder / "text_encoder")
    index = {
        "transformer": ["diffusers", "Flux2Transformer2DModel"],
        "text_encoder": ["transformers", "Mistral3ForConditionalGeneration"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return write_tokenizer(folder / "tokenizer"), encoder


def converted(folder: Path, data: torch.Tensor) -> dict[str, Any]:
    """Return the tokenizer that ComfyUI makes with transformers 4, from the converter of transformers 5."""
    (folder / "tekken.json").write_bytes(data.numpy().tobytes())
    tokenizer = MistralConverter(str(folder / "tekken.json")).converted()
    tokenizer.post_processor = START
    return {"tokenizer_object": tokenizer}


def test_a_prompt_equals_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Small(comfy.text_encoders.llama.Mistral3Small24BConfig):  # type: ignore[misc]
        vocab_size: int = WORDS
        intermediate_size: int = SMALL["intermediate_size"]
        num_attention_heads: int = SMALL["num_attention_heads"]
        num_key_value_heads: int = SMALL["num_key_value_heads"]
        head_dim = SMALL["head_dim"]

    monkeypatch.setattr(comfy.text_encoders.llama, "Mistral3Small24BConfig", Small)
    converts = hasattr(comfy.text_encoders.flux, "LlamaTokenizerFast")  # newer ComfyUIs read the file themselves
    if converts and "vocab" not in inspect.signature(MistralConverter).parameters:  # ComfyUI 0.8.0 needs transformers 4
        monkeypatch.setattr(comfy.text_encoders.flux, "load_mistral_tokenizer", partial(converted, tmp_path))
        monkeypatch.setattr(comfy.text_encoders.flux, "LlamaTokenizerFast", PreTrainedTokenizerFast)
    tokenizer, encoder = write(tmp_path)
    clip: Any = core_clip(open_checkpoint(tmp_path), Flux2.text)
    prompt = "the otter's (blue:1.3) boats 3 größer"
    ours = clip.encode_from_tokens(clip.tokenize(prompt))
    ids = torch.tensor([tokenizer.encode(clip.tokenizer.llama_template.format(prompt)).ids])
    states = encoder(input_ids=ids, output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer] for layer in (10, 20, 30)], dim=-1)
    assert ours.shape == expected.shape
    assert relative_error(ours, expected) < 1e-4
