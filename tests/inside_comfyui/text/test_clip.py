"""ComfyUI's own text encoders from a diffusers folder, with the published models' weight names and shapes."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import comfy.sd
import pytest
import torch
import transformers
from any_folder_name.nodes.bridges.bridge import CoreText
from any_folder_name.nodes.families.registry import bridge_class
from any_folder_name.nodes.remote import clip
from any_folder_name.nodes.remote.preflight import CLIP_OUTPUT, VAE_OUTPUT, check_output
from any_folder_name.parallel_backend.checkpoint.opening import open_checkpoint
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.families.registry import FAMILIES
from safetensors.torch import save_file
from torch import Tensor

META = torch.device("meta")
Weights = dict[str, Tensor]


@cache
def weights(class_name: str, kind: str) -> Weights:
    """Return a published text encoder's weights on the meta device."""
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
    "VL 4B": lambda: transformers.Qwen3VLConfig(
        text_config={
            "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        },
        vision_config={
            "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2560,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    ),
    "VL 32B": lambda: transformers.Qwen3VLConfig(
        text_config={
            "vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
        },
        vision_config={
            "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 5120,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    ),
    "llava": lambda: transformers.LlavaConfig(
        text_config=CONFIGS["8B"](), vision_config={"model_type": "clip_vision_model", "num_hidden_layers": 1}
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


def with_prefix(state: Weights, before: str, after: str) -> Weights:
    return {after + name.removeprefix(before) if name.startswith(before) else name: t for name, t in state.items()}


def as_published(state: Weights) -> Weights:
    """Return the weights under the names that transformers 4 saves."""
    for before, after in (("model.language_model.", "model."), ("model.visual.", "visual.")):
        state = with_prefix(state, before, after)
    bare = "embeddings.token_embedding.weight" in state
    return with_prefix(state, "", "text_model.") if bare else state


L, L_POOLED = ("CLIPTextModel", "L"), ("CLIPTextModelWithProjection", "L")
G, XXL = ("CLIPTextModelWithProjection", "G"), ("T5EncoderModel", "XXL")
ALL_CASES: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "flux": ("FLUX", (L, XXL)),
    "chroma": ("CHROMA", (XXL,)),
    "sd3": ("SD3", (L_POOLED, G, XXL)),
    "sd3 without t5": ("SD3", (L_POOLED, G)),
    "hunyuan": ("HUNYUAN_VIDEO", (("LlamaModel", "8B"), L)),
    "hunyuan i2v": ("HUNYUAN_VIDEO", (("LlavaForConditionalGeneration", "llava"), L)),
    "qwen": ("QWEN_IMAGE", (("Qwen2_5_VLForConditionalGeneration", "7B"),)),
    "z-image": ("LUMINA2", (("Qwen3Model", "4B"),)),
    "z-image with its head": ("LUMINA2", (("Qwen3ForCausalLM", "4B"),)),
    "krea": ("KREA2", (("Qwen3VLModel", "VL 4B"),)),
    "krea with its head": ("KREA2", (("Qwen3VLForConditionalGeneration", "VL 4B"),)),
    "ltx": ("LTXV", (XXL,)),
    "minimax": ("MINIMAX", (("Qwen3VLModel", "VL 32B"),)),
    "minimax with its head": ("MINIMAX", (("Qwen3VLForConditionalGeneration", "VL 32B"),)),
    "mochi": ("MOCHI", (XXL,)),
    "pixart": ("PIXART", (XXL,)),
}
CASES = {name: case for name, case in ALL_CASES.items() if case[0] in comfy.sd.CLIPType.__members__}
"""Those that this version of ComfyUI has."""


UNUSED = {"FLUX": {"text_projection.weight"}, "HUNYUAN_VIDEO": {"text_projection.weight"}}
"""Weights that ComfyUI's class has and never uses."""


@pytest.mark.parametrize(
    ("name", "saved"), [*((name, dict) for name in CASES), ("flux", as_published), ("qwen", as_published)]
)
@pytest.mark.daily(6)
def test_no_weight_is_missing(name: str, saved: Callable[[Weights], Weights], monkeypatch: pytest.MonkeyPatch) -> None:
    kind, components = CASES[name]
    missing_weights: list[set[str]] = []
    load_sd = comfy.sd.CLIP.load_sd

    def spy(self: Any, state: Weights, full_model: bool = False) -> Any:
        missing, unexpected = load_sd(self, state, full_model)
        missing_weights.append(set(missing) - UNUSED.get(kind, set()))
        return missing, unexpected

    monkeypatch.setattr(comfy.sd.CLIP, "load_sd", spy)
    # Copies of ComfyUI's repository often lack this tokenizer's file, which has nothing to do with weights.
    monkeypatch.setattr(comfy.text_encoders.hunyuan_video, "LLAMA3Tokenizer", lambda **_: None)
    state_dicts = [clip.with_comfyui_names(saved(weights(*component))) for component in components]
    options = {"initial_device": META}
    comfy.sd.load_text_encoder_state_dicts(state_dicts, clip_type=comfy.sd.CLIPType[kind], model_options=options)
    assert missing_weights == [set()] * len(components)


MOCHI = "MochiTransformer3DModel"


def core_clip(folder: Path) -> clip.LazyCoreClip:
    checkpoint = open_checkpoint(folder)
    text = bridge_class(checkpoint.components["transformer"]).text
    assert isinstance(text, CoreText)
    return clip.core_clip(checkpoint, text)


def test_a_missing_optional_component_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = "CLIPTextModelWithProjection"
    components = {"text_encoder": kind, "text_encoder_3": None, "transformer": "SD3Transformer2DModel"}
    index = {name: ["transformers", value] for name, value in components.items()}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    (tmp_path / "text_encoder").mkdir()
    (tmp_path / "text_encoder" / "config.json").write_text("{}")
    save_file({"encoder.layers.0.mlp.fc1.weight": torch.ones(1)}, tmp_path / "text_encoder" / "model.safetensors")
    loaded: list[Any] = []

    def load(states: list[Weights], **options: Any) -> Any:
        loaded.extend(states)
        raise InvalidRequest("seen")

    monkeypatch.setattr(comfy.sd, "load_text_encoder_state_dicts", load)
    with pytest.raises(InvalidRequest, match="seen"):
        core_clip(tmp_path).tokenize("a dog")
    assert [list(state) for state in loaded] == [["text_model.encoder.layers.0.mlp.fc1.weight"]]


@pytest.mark.parametrize(
    ("listed", "config", "message"),
    [("model-00002-of-2.safetensors", {}, "lacks model-00002"), (None, {"quantization_config": {}}, "is quantised")],
)
def test_an_incomplete_text_encoder_is_refused(
    tmp_path: Path, listed: str | None, config: dict[str, Any], message: str
) -> None:
    folder, file = tmp_path / "text_encoder", "model-00001-of-2.safetensors"
    index = {"text_encoder": ["transformers", "T5EncoderModel"], "transformer": ["diffusers", MOCHI]}
    folder.mkdir()
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"encoder.layers.0.mlp.fc1.weight": torch.ones(1)}, folder / file)
    weight_map = {"a": file, **({"b": listed} if listed else {})}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InvalidRequest, match=message):
        core_clip(tmp_path).tokenize("a")


@pytest.mark.parametrize(
    ("output", "component", "kind"),
    [(CLIP_OUTPUT, "text_encoder", "T5EncoderModel"), (VAE_OUTPUT, "vae", "AutoencoderKLMochi")],
)
def test_compressed_weights_in_a_folder_are_refused_before_anything_loads(
    tmp_path: Path, output: int, component: str, kind: str
) -> None:
    index = {component: ["transformers", kind], "transformer": ["diffusers", MOCHI]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    for name in index:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        save_file(
            {"q.weight": torch.ones(2, 2), "q.weight_scale": torch.ones(1)}, tmp_path / name / "model.safetensors"
        )
    with pytest.raises(
        InvalidRequest, match=rf"{component} has compressed weights \(q.weight_scale\), .*plain weights"
    ):
        check_output(open_checkpoint(tmp_path), output)


@pytest.mark.parametrize(
    ("transformer", "encoders", "message"),
    [
        ("Flux2Transformer2DModel", ("Qwen3ForCausalLM",), "is Qwen3ForCausalLM, .* needs Mistral3ForConditionalGen"),
        ("FluxTransformer2DModel", ("CLIPTextModel",), "text_encoder_2 is missing, .* needs T5EncoderModel"),
        ("FluxTransformer2DModel", ("T5EncoderModel", "CLIPTextModel"), "text_encoder is T5EncoderModel"),
        ("HunyuanVideoTransformer3DModel", ("LlamaModel",), "text_encoder_2 is missing"),
        ("HunyuanVideoTransformer3DModel", ("Qwen2_5_VLModel", "T5EncoderModel"), "LlamaModel or LlamaForCausalLM or"),
        ("SD3Transformer2DModel", ("CLIPTextModelWithProjection", "T5EncoderModel"), "text_encoder_2 is T5Enc"),
        ("ZImageTransformer2DModel", ("Gemma2Model",), "is Gemma2Model, .* needs Qwen3Model or Qwen3ForCausalLM"),
        (MOCHI, ("UMT5EncoderModel",), "load the text encoders with ComfyUI's own nodes instead"),
    ],
)
def test_a_text_encoder_that_comfyui_would_mistake_is_refused(
    transformer: str, encoders: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    names = [f"text_encoder_{i}".removesuffix("_1") for i in range(1, len(encoders) + 1)]
    index = {name: ["transformers", kind] for name, kind in zip(names, encoders, strict=True)}
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"transformer": ["diffusers", transformer]}))
    with pytest.raises(InvalidRequest, match=message):
        core_clip(tmp_path).tokenize("a dog")
    with pytest.raises(InvalidRequest, match=message):
        check_output(open_checkpoint(tmp_path), CLIP_OUTPUT)


@pytest.mark.parametrize("name", CASES)
def test_every_published_text_encoder_is_accepted(name: str) -> None:
    kind, components = CASES[name]
    texts = [text for name in FAMILIES if isinstance(text := bridge_class(name).text, CoreText)]
    supported = [text.components.values() for text in texts if text.clip_type == kind]
    assert any(all(pair[0] in classes for pair, classes in zip(components, each, strict=False)) for each in supported)
