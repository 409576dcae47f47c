"""Captions in the style of users' prompts, and the word-level tokenizer for them."""

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from training.scenes import COLOURS, DIRECTIONS, SHAPES, Scene

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
OTHER_WORDS = ("a", "an", "the", "on", "in", "with", "and", "moving", "background", "to", "is", "of", ",", ".")
EMPTY_SHARE = 0.1
"""Share of captions that are empty."""
FULL_SHARE = 0.6
"""Share of captions that name everything."""


def vocabulary() -> dict[str, int]:
    """Return the token id of each word; padding is 0 and the end of a prompt 1, as in T5."""
    words = (PAD, END, UNKNOWN, *OTHER_WORDS, *SHAPES, *COLOURS, *DIRECTIONS)
    return {word: i for i, word in enumerate(words)}


def new_tokenizer() -> PreTrainedTokenizerFast:
    """Create a tokenizer of lower-cased words and punctuation. Every prompt, even an empty one, ends with ``</s>``."""
    tokenizer = Tokenizer(models.WordLevel(vocabulary(), unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", pair=f"$A {END} $B {END}", special_tokens=[(END, vocabulary()[END])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, model_max_length=512
    )


def save_tokenizer(folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, with a class name that transformers 4 knows as well."""
    new_tokenizer().save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(config, indent=2) + "\n")


def training_caption(rng: random.Random, scene: Scene) -> str:
    """Return the full caption most of the time; otherwise an empty one, for guidance, or a shorter or reworded one."""
    draw = rng.random()
    if draw < EMPTY_SHARE:
        return ""
    if draw < EMPTY_SHARE + FULL_SHARE:
        return scene.caption
    return rng.choice(_other_captions(scene))


def _other_captions(scene: Scene) -> tuple[str, ...]:
    motion = f" moving {scene.direction}" if scene.direction else ""
    ending = f", moving {scene.direction}" if scene.direction else ""
    return (
        f"a {scene.colour} {scene.shape}{motion}",
        f"{scene.colour} {scene.shape}{motion} on {scene.background}",
        f"{scene.colour} {scene.shape}, {scene.background} background{ending}",
        f"on a {scene.background} background, a {scene.colour} {scene.shape}{motion}",
        f"a {scene.colour} {scene.shape} on a {scene.background} background",
        f"a {scene.shape}{motion}",
    )
