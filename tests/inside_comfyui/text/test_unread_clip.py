"""A CLIP of ComfyUI's own is read at its first use, once, and whatever a node held before is then the real one."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import comfy.hooks
import comfy.model_management
import comfy.model_patcher
import comfy.sd
import pytest
import torch
from any_folder_name.nodes.remote.unread_clip import LazyCoreClip
from any_folder_name.parallel_backend.errors import InvalidRequest

import nodes as core_nodes

WORDS = {"clip": [[(1, 1.0), (2, 1.0)]]}
WEIGHT = "clip.weight"


class Encoder(torch.nn.Module):
    """A text encoder with what ``comfy.sd.CLIP`` asks of one."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.clip = torch.nn.Linear(2, 3, bias=False)
        self.dtypes = {torch.float32}
        self.layer: int | None = None

    def reset_clip_options(self) -> None:
        self.layer = None

    def set_clip_options(self, options: dict[str, Any]) -> None:
        self.layer = options.get("layer", self.layer)

    def encode_token_weights(self, tokens: Any) -> Any:
        return torch.full((1, 1, 1), float(self.layer or 0)), None

    def load_sd(self, sd: Any) -> Any:
        return self.load_state_dict(sd)


class Tokenizer:
    """A tokenizer likewise."""

    clip_name = "small"

    def __init__(self, **options: Any) -> None:
        pass

    def tokenize_with_weights(self, text: str, return_word_ids: bool = False, **options: Any) -> Any:
        return WORDS

    def state_dict(self) -> dict[str, Any]:
        return {}


class Reader:
    """Reads a small CLIP and counts."""

    def __init__(self) -> None:
        self.reads = 0

    def __call__(self) -> comfy.sd.CLIP:
        self.reads += 1
        return comfy.sd.CLIP(SimpleNamespace(params={}, clip=Encoder, tokenizer=Tokenizer))


@pytest.fixture
def read() -> Reader:
    return Reader()


@pytest.fixture
def clip(read: Reader) -> LazyCoreClip:
    return LazyCoreClip(read)


def set_hooks(clip: Any) -> Any:
    clip.patcher.forced_hooks = comfy.hooks.HookGroup()
    return clip


USES: dict[str, Callable[[Any], Any]] = {
    "CLIPTextEncode": lambda clip: core_nodes.CLIPTextEncode().encode(clip, "a dog"),
    "CLIPSetLastLayer": lambda clip: core_nodes.CLIPSetLastLayer().set_last_layer(clip, -2),
    "tokenize": lambda clip: clip.tokenize("a dog"),
    "encode": lambda clip: clip.encode_from_tokens(WORDS),
    "clone": lambda clip: clip.clone(),
    "add_patches": lambda clip: clip.add_patches({WEIGHT: (torch.ones(3, 2),)}),
    "LoRA": lambda clip: comfy.sd.load_lora_for_models(None, clip, {}, 0.0, 1.0),
    "load_model": lambda clip: clip.load_model(),
    "get_sd": lambda clip: clip.get_sd(),
    "get_key_patches": lambda clip: clip.get_key_patches(),
    "memory management": lambda clip: comfy.model_management.load_models_gpu([clip.patcher]),
    "patcher's clone": lambda clip: clip.patcher.clone(),
    "patcher's attachment": lambda clip: clip.patcher.set_attachments("a node's", 1),
    "patcher's attribute": set_hooks,
    "names of weights": lambda clip: clip.cond_stage_model.state_dict(),
    "modules": lambda clip: list(clip.cond_stage_model.modules()),
    "encoder": lambda clip: clip.cond_stage_model.encode_token_weights(WORDS),
    "tokenizer": lambda clip: clip.tokenizer.tokenize_with_weights("a dog"),
    "copy": lambda clip: copy.copy(clip).tokenize("a dog"),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_the_first_use_reads_once(clip: LazyCoreClip, read: Reader, use: Callable[[Any], Any]) -> None:
    patcher, encoder, tokenizer = clip.patcher, clip.cond_stage_model, clip.tokenizer
    copied = copy.copy(clip)
    assert read.reads == 0
    use(clip)
    use(clip)
    assert read.reads == 1
    for each in (clip, copied):
        assert core_nodes.CLIPTextEncode().encode(each, "a dog")[0][0][0].shape == (1, 1, 1)
        assert type(each) is comfy.sd.CLIP
        assert type(each.cond_stage_model) is Encoder
        assert each.patcher.model_size() == 24
    patcher.set_attachments("another's", 2)
    assert clip.patcher.get_attachment("another's") == 2
    assert encoder.clip.weight is clip.cond_stage_model.clip.weight
    assert tokenizer.clip_name == clip.tokenizer.clip_name
    assert read.reads == 1


def test_what_a_patcher_gets_arrives_at_the_text_encoder(clip: LazyCoreClip) -> None:
    before = clip.cond_stage_model
    clip.patcher.add_patches({WEIGHT: ("diff", (torch.ones(3, 2),))}, 0.5)
    weight = clip.cond_stage_model.get_parameter(WEIGHT).clone()
    clip.load_model()
    assert torch.equal(before.get_parameter(WEIGHT), weight + 0.5)


def test_what_a_node_sets_on_it_before_stays(clip: LazyCoreClip, read: Reader) -> None:
    clip.clip_layer(-2)
    clip.set_tokenizer_option("small_min_length", 5)
    clip.use_clip_schedule = True
    assert read.reads == 0
    assert clip.encode_from_tokens(WORDS).item() == -2
    assert (clip.layer_idx, clip.tokenizer_options, clip.use_clip_schedule) == (-2, {"small_min_length": 5}, True)


def test_a_deep_copy_is_another_one(clip: LazyCoreClip, read: Reader) -> None:
    copied = copy.deepcopy(clip)
    copied.cond_stage_model.load_sd({WEIGHT: torch.ones(3, 2)})
    assert torch.equal(copied.clone().cond_stage_model.clip.weight, torch.ones(3, 2))
    assert not torch.equal(clip.clone().cond_stage_model.clip.weight, torch.ones(3, 2))


def test_an_unread_one_takes_no_memory_and_ends_unread(clip: LazyCoreClip, read: Reader) -> None:
    patcher = clip.patcher
    assert (patcher.model_size(), patcher.loaded_size(), patcher.lowvram_patch_counter()) == (0, 0, 0)
    assert patcher.load_device == comfy.model_management.text_encoder_device()
    assert not patcher.is_clone(copy.copy(patcher).model)
    del patcher, clip
    gc.collect()
    assert read.reads == 0


def test_one_that_was_read_ends_with_its_last_holder(read: Reader) -> None:
    clip = LazyCoreClip(read)
    clip.tokenize("a dog")
    weights, clone = weakref.ref(clip.cond_stage_model.clip), clip.clone()
    gc.disable()
    try:
        del clip
        assert weights() is not None
        del clone
        assert weights() is None
    finally:
        gc.enable()


def test_a_look_does_not_wait_while_another_clip_is_read(clip: LazyCoreClip, read: Reader) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def read_slowly() -> comfy.sd.CLIP:
        begun.set()
        assert may_end.wait(30)
        return read()

    patcher = clip.patcher  # a node holds what stood for it
    clip.encode_from_tokens(WORDS)
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(LazyCoreClip(read_slowly).encode_from_tokens, WORDS)
        assert begun.wait(30)
        try:
            assert pool.submit(getattr, patcher, "no_such_name", None).result(10) is None
        finally:
            may_end.set()
        reading.result(30)


def test_a_use_that_cannot_read_says_why_each_time() -> None:
    def read() -> comfy.sd.CLIP:
        raise InvalidRequest("no text encoder")

    clip = LazyCoreClip(read)
    for use in (*USES.values(), *USES.values()):
        with pytest.raises(InvalidRequest, match="no text encoder"):
            use(clip)
    assert getattr(clip.cond_stage_model, "clip_l", None) is None
    with pytest.raises(InvalidRequest, match="uses clip_l of a CLIP before the CLIP is used: encode a prompt"):
        _ = clip.cond_stage_model.clip_l
