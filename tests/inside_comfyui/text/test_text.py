"""Our CLIP against ComfyUI's own text encoder and against diffusers'."""

from typing import Any

import pytest
from any_folder_name.nodes.remote import clip as clip_module
from any_folder_name.parallel_backend.errors import InvalidRequest
from diffusers import WanPipeline
from helpers.inside_fixtures import Loaded, relative_error
from helpers.native_text import core_encoder, encode
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedTokenizerFast

import nodes as core_nodes


@pytest.mark.parametrize("text", ["a red circle", "", "(red:1.3) circle on (blue:0.5)", "((red)) square " * 200])
def test_prompts_and_weights_equal_comfyui(loaded: Loaded, text: str) -> None:
    tokens = loaded.clip.tokenize(text)["umt5xxl"]
    reference = core_encoder(loaded).encode_token_weights(tokens)[0]
    ours = encode(loaded.clip, text)
    assert ours.shape == reference.shape
    assert ours.shape[1] >= 512
    assert relative_error(ours, reference) < 1e-5


def test_plain_prompt_equals_diffusers(loaded: Loaded, models: Any) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(models / "tiny" / "tokenizer" / "tokenizer.json"), pad_token="<pad>", eos_token="</s>"
    )
    pipeline = WanPipeline(
        tokenizer=tokenizer, text_encoder=loaded.client.text_encoder, vae=None, scheduler=None, transformer=None
    )
    reference = pipeline._get_t5_prompt_embeds("a red circle on a blue background", max_sequence_length=512)
    assert relative_error(encode(loaded.clip, "a red circle on a blue background"), reference) < 1e-5


@pytest.mark.parametrize("layer", [-1, -2, -24])
def test_set_last_layer_equals_comfyui(loaded: Loaded, layer: int) -> None:
    (clip,) = core_nodes.CLIPSetLastLayer().set_last_layer(loaded.clip, layer)
    assert type(clip) is type(loaded.clip)
    reference = core_encoder(loaded)
    reference.set_clip_options({"layer": layer})
    tokens = clip.tokenize("a (red:1.3) circle")["umt5xxl"]
    assert relative_error(encode(clip, "a (red:1.3) circle"), reference.encode_token_weights(tokens)[0]) < 1e-5
    plain = core_encoder(loaded).encode_token_weights(tokens)[0]
    assert relative_error(encode(loaded.clip, "a (red:1.3) circle"), plain) < 1e-5


def test_saving_is_refused(loaded: Loaded) -> None:
    for clip in (loaded.clip, loaded.clip.clone()):
        with pytest.raises(InvalidRequest, match="cannot be saved"):
            clip.get_sd()


def test_textual_inversion_is_refused(loaded: Loaded) -> None:
    with pytest.raises(InvalidRequest, match="textual inversions"):
        encode(loaded.clip, "a embedding:face circle")


def test_every_saved_form_of_a_language_model_is_renamed(loaded: Loaded) -> None:
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    weights = LlamaModel(config).state_dict()
    for prefix in ("", "model.", "language_model.model.", "model.language_model."):
        saved = {f"{prefix}{name}": weight for name, weight in weights.items()}
        renamed = clip_module.with_comfyui_names(saved)
        assert renamed.keys() == LlamaForCausalLM(config).state_dict().keys() - {"lm_head.weight"}
    t5 = loaded.client.text_encoder.state_dict()
    assert clip_module.with_comfyui_names(t5) == t5
