"""ComfyUI's own text encoders from the weights of a diffusers folder: names and shapes of the published models."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import comfy.sd
import pytest
import torch
import transformers
from any_folder_name.nodes import clip
from any_folder_name.nodes.families.bridge import CoreText
from any_folder_name.nodes.tekken import tekken
from any_folder_name.parallel_backend.checkpoint import Checkpoint
from any_folder_name.parallel_backend.errors import InvalidRequest
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers.integrations.mistral import MistralConverter

META = torch.device("meta")
Weights = dict[str, Tensor]


@cache
def weights(class_name: str, kind: str) -> Weights:
    """Of a published text encoder, on the meta device."""
    with META:
        model = getattr(transformers, class_name)(CONFIGS[kind]())
    return {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}


def _clip(**options: Any) -> Any:
    return transformers.CLIPTextConfig(vocab_size=49408, max_position_embeddings=77, **options)


CONFIGS: dict[str, Callable[[], Any]] = {
    "L": lambda: _clip(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, projection_dim=768
    ),
    "G": lambda: _clip(
        hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20, projection_dim=1280
    ),
    "XXL": lambda: transformers.T5Config(
        vocab_size=32128, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False,
    ),
    "8B": lambda: transformers.LlamaConfig(
        vocab_size=128320, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "4B": lambda: transformers.Qwen3Config(
        vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128,
    ),
    "7B": lambda: transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4,
        },
        vision_config={
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
        },
    ),
}  # fmt: skip


def moved(state: Weights, before: str, after: str) -> Weights:
    return {after + name.removeprefix(before) if name.startswith(before) else name: t for name, t in state.items()}


def as_published(state: Weights) -> Weights:
    """Under the names that transformers 4 wrote."""
    for before, after in (("model.language_model.", "model."), ("model.visual.", "visual.")):
        state = moved(state, before, after)
    bare = "embeddings.token_embedding.weight" in state
    return moved(state, "", "text_model.") if bare else state


L, L_POOLED = ("CLIPTextModel", "L"), ("CLIPTextModelWithProjection", "L")
G, XXL = ("CLIPTextModelWithProjection", "G"), ("T5EncoderModel", "XXL")
CASES: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "flux": ("FLUX", (L, XXL)),
    "sd3": ("SD3", (L_POOLED, G, XXL)),
    "sd3 without t5": ("SD3", (L_POOLED, G)),
    "hunyuan": ("HUNYUAN_VIDEO", (("LlamaModel", "8B"), L)),
    "qwen": ("QWEN_IMAGE", (("Qwen2_5_VLForConditionalGeneration", "7B"),)),
    "z-image": ("LUMINA2", (("Qwen3Model", "4B"),)),
    "z-image with its head": ("LUMINA2", (("Qwen3ForCausalLM", "4B"),)),
    "ltx": ("LTXV", (XXL,)),
    "mochi": ("MOCHI", (XXL,)),
    "pixart": ("PIXART", (XXL,)),
}


UNUSED = {"FLUX": {"text_projection.weight"}, "HUNYUAN_VIDEO": {"text_projection.weight"}}
"""What ComfyUI's class has and never uses there."""


@pytest.mark.parametrize(
    ("name", "saved"), [*((name, dict) for name in CASES), ("flux", as_published), ("qwen", as_published)]
)
def test_no_weight_is_missing(name: str, saved: Callable[[Weights], Weights], monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith("z-image") and not hasattr(comfy.sd.TEModel, "QWEN3_4B"):
        pytest.skip("this version of ComfyUI does not know the text encoder")
    kind, components = CASES[name]
    found: list[set[str]] = []
    load_sd = comfy.sd.CLIP.load_sd

    def spy(self: Any, state: Weights, full_model: bool = False) -> Any:
        missing, unexpected = load_sd(self, state, full_model)
        found.append(set(missing) - UNUSED.get(kind, set()))
        return missing, unexpected

    monkeypatch.setattr(comfy.sd.CLIP, "load_sd", spy)
    states = [clip.renamed(saved(weights(*component))) for component in components]
    options = {"initial_device": META}
    comfy.sd.load_text_encoder_state_dicts(states, clip_type=comfy.sd.CLIPType[kind], model_options=options)
    assert found == [set()] * len(components)


def test_a_component_that_the_folder_lacks_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    components = {"text_encoder": "CLIPTextModel", "text_encoder_3": None, "transformer": "SD3Transformer2DModel"}
    index = {name: ["transformers", value] for name, value in components.items()}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    (tmp_path / "text_encoder").mkdir()
    (tmp_path / "text_encoder" / "config.json").write_text("{}")
    save_file({"encoder.layers.0.mlp.fc1.weight": torch.ones(1)}, tmp_path / "text_encoder" / "model.safetensors")
    read: list[Any] = []

    def load(states: list[Weights], **options: Any) -> Any:
        read.extend(states)
        raise InvalidRequest("seen")

    monkeypatch.setattr(comfy.sd, "load_text_encoder_state_dicts", load)
    text = CoreText(components=("text_encoder", "text_encoder_2", "text_encoder_3"), clip_type="SD3")
    with pytest.raises(InvalidRequest, match="seen"):
        clip.CoreClip(Checkpoint.open(tmp_path), text).tokenize("a dog")
    assert [list(state) for state in read] == [["text_model.encoder.layers.0.mlp.fc1.weight"]]


@pytest.mark.parametrize(
    ("listed", "config", "said"),
    [("model-00002-of-2.safetensors", {}, "lacks model-00002"), (None, {"quantization_config": {}}, "is quantised")],
)
def test_a_text_encoder_that_is_not_whole_is_refused(
    tmp_path: Path, listed: str | None, config: dict[str, Any], said: str
) -> None:
    folder, file = tmp_path / "text_encoder", "model-00001-of-2.safetensors"
    index = {"text_encoder": ["transformers", "CLIPTextModel"], "transformer": ["diffusers", "FluxTransformer2DModel"]}
    folder.mkdir()
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"encoder.layers.0.mlp.fc1.weight": torch.ones(1)}, folder / file)
    weight_map = {"a": file, **({"b": listed} if listed else {})}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InvalidRequest, match=said):
        clip.CoreClip(Checkpoint.open(tmp_path), CoreText(components=("text_encoder",), clip_type="FLUX")).tokenize("a")


def test_mistrals_tokenizer_is_the_same_in_its_own_format(tmp_path: Path) -> None:
    written, own = tmp_path / "tokenizer.json", tmp_path / "tekken.json"
    tokenizer = _mistral(["the otter's 3 blue boats", "größer, naïve", "\n\tdef f(x): return x"] * 3)
    tokenizer.save(str(written))
    own.write_bytes(tekken(written))
    again = MistralConverter(str(own)).converted()
    for text in ("the otter", "[INST]größer boats 33[/INST]", "\n\n f(x) 你"):
        assert again.encode(text).ids == tokenizer.encode(text).ids
    written.write_text("{}")
    with pytest.raises(InvalidRequest, match="cannot be read as Mistral's tokenizer"):
        tekken(written)


def _mistral(texts: list[str]) -> Tokenizer:
    """A small tokenizer of the kind, as diffusers folders have it."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    words = pre_tokenizers.Split(Regex(r"\p{L}+| ?\p{N}|[^\s\p{L}\p{N}]+|\s+"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, vocab_size=300)
    )
    return tokenizer
