"""ComfyUI's CLIP class with the checkpoint's tokenizer and the ranks' text encoder.

Prompt weights, escapes and padding are ComfyUI's own code. Only the token ids come from the checkpoint's tokenizer,
and only the encoder's forward runs on the ranks.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import comfy.hooks
import comfy.model_management
import comfy.sd
import comfy.sd1_clip
import torch
from comfy.text_encoders.spiece_tokenizer import SPieceTokenizer
from torch import Tensor
from typing_extensions import override

from ...parallel_backend.checkpoint.checkpoint import Checkpoint
from ...parallel_backend.checkpoint.weight_headers import read_files, weights_under
from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.protocol.messages import EncodeText
from ..backend.connection import Handle
from ..bridges.bridge import BackendText, MetaWeights
from ..bridges.given_numbers import as_int
from .changing_patcher import ChangingPatcher
from .layer_path import Layers
from .patcher import RemotePatcher, prepare_component
from .preflight import CLIP_OUTPUT, check_output
from .weight_changes import WeightChanges

Pair = tuple[int, float]


class _CheckpointTokenizer:
    """The checkpoint's ``tokenizer.json`` with the interface that ``SDTokenizer`` calls."""

    def __init__(self, file: str) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(file)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    @classmethod
    def from_pretrained(cls, path: str) -> "_CheckpointTokenizer":
        return cls(path)

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": self._tokenizer.encode(text).ids}

    def get_vocab(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())


class PromptTokenizer:
    """Turns prompts into weighted ids, padded to the family's length. Longer prompts are not cut, as in ComfyUI.

    The tokenizer's file is read at the first prompt.
    """

    def __init__(self, checkpoint: Checkpoint, text: BackendText) -> None:
        self._checkpoint, self._text = checkpoint, text
        self._native: comfy.sd1_clip.SDTokenizer | None = None

    def tokenize_with_weights(self, text: str, return_word_ids: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Return ``{key: [[(id, weight), ...]]}``, with word ids on request.

        Raises:
            InvalidRequest: there is no text encoder or tokenizer, or the prompt has a textual inversion.
        """
        if "embedding:" in text:
            raise InvalidRequest(
                "textual inversions (embedding:...) are not supported by this CLIP: remove them from the prompt, or "
                "use ComfyUI's Load CLIP"
            )
        return {self._text.key: self._tokenizer().tokenize_with_weights(text, return_word_ids, **kwargs)}

    def untokenize(self, pairs: Sequence[Pair]) -> list[Any]:
        """Return each pair with its token's text."""
        return list(self._tokenizer().untokenize(pairs))

    def state_dict(self) -> NoReturn:
        """Refuse to save the CLIP, for which ComfyUI calls this.

        Raises:
            InvalidRequest: always.
        """
        raise InvalidRequest("this CLIP cannot be saved: its weights live in the backend's processes")

    def _tokenizer(self) -> comfy.sd1_clip.SDTokenizer:
        if self._native is None:
            check_output(self._checkpoint, CLIP_OUTPUT)
            folder = self._checkpoint.path / "tokenizer"
            classes = {"tokenizer.json": _CheckpointTokenizer, "spiece.model": SPieceTokenizer}
            files = [name for name in classes if (folder / name).is_file()]
            if not files:
                raise InvalidRequest(
                    f"{self._checkpoint.name}/tokenizer has neither {' nor '.join(classes)}: download the model "
                    "again, or use ComfyUI's Load CLIP"
                )
            self._native = comfy.sd1_clip.SDTokenizer(
                str(folder / files[0]),
                tokenizer_class=classes[files[0]],
                has_start_token=False,
                pad_with_end=False,
                pad_token=special_tokens(self._checkpoint)["pad"],
                pad_to_max_length=False,
                max_length=99999999,
                min_length=self._text.length,
                embedding_key=self._text.key,
            )
        return self._native


class TextPatcher(ChangingPatcher):
    """The patcher of a CLIP whose ``cond_stage_model`` is a ``RemoteTextEncoder``."""

    @property
    def target(self) -> "RemoteTextEncoder":
        encoder: RemoteTextEncoder = self.model
        return encoder

    @override
    def patch_model(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse what nodes set on a CLIP besides LoRAs. ComfyUI calls this before it encodes a prompt.

        Raises:
            InvalidRequest: there is something. The message names it.
        """
        set_on_it = [*self.object_patches, *self.weight_wrapper_patches]
        if set_on_it:
            raise InvalidRequest(
                f"a node changes {set_on_it[0]} of this CLIP, whose text encoder runs in the backend's processes: "
                "remove that node, or use ComfyUI's Load CLIP"
            )
        return super().patch_model(*args, **kwargs)


class RemoteTextEncoder(torch.nn.Module, comfy.sd1_clip.ClipTokenWeightEncoder):  # type: ignore[misc]
    """The text encoder with the interface that ``comfy.sd.CLIP`` calls."""

    def __init__(self, handle: Handle, text: BackendText, model: RemotePatcher) -> None:
        """Create the encoder. ``model`` is the patcher of the loader's MODEL."""
        super().__init__()
        self.handle, self._text, self._model = handle, text, model
        self.dtypes: set[torch.dtype] = set()
        self._layer = -1
        self.special_tokens = special_tokens(handle.checkpoint)
        self.weights = _weights(handle.checkpoint)
        self.changes = WeightChanges()
        self.weight_prefix = f"{text.key}.transformer."
        self.components = ("text_encoder",)

    def __getattr__(self, name: str) -> Any:
        """Return a layer's path under ComfyUI's name."""
        own = vars(self)
        if "weight_prefix" not in own or name != own["weight_prefix"].partition(".")[0]:
            return super().__getattr__(name)
        return Layers(weights=self.state_dict()).at(name)

    def __deepcopy__(self, memo: Any) -> "RemoteTextEncoder":
        """Return this module: the weights are in the ranks, and are not copied."""
        return self

    def state_dict(self, *args: Any, **_: Any) -> Any:
        """Return meta tensors under ComfyUI's names, from which its LoRA nodes learn what they would change."""
        return {self.weight_prefix + name: tensor for name, tensor in self.weights.tensors.items()}

    def reset_clip_options(self) -> None:
        """Select the last layer."""
        self._layer = -1

    def set_clip_options(self, options: dict[str, Any]) -> None:
        """Select CLIPSetLastLayer's ``layer``. The other options concern pooled outputs and devices."""
        layer = options.get("layer")
        self._layer = self._layer if layer is None else as_int(layer, "the layer of the text encoder")

    @override
    def encode_token_weights(self, token_weight_pairs: dict[str, list[list[Pair]]]) -> Any:
        """Return embeddings ``[1, L, D]``, weighted by ComfyUI's own formula, and no pooled output."""
        return super().encode_token_weights(token_weight_pairs[self._text.key])

    def encode(self, tokens: list[list[int]]) -> tuple[Tensor, None]:
        """Return embeddings ``[N, L, D]`` of ``N`` prompts. Masked padding after a prompt's end token is zero."""
        check_output(self.handle.checkpoint, CLIP_OUTPUT)
        longest = max(map(len, tokens))
        pad, end = self.special_tokens["pad"], self.special_tokens["end"]
        ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in tokens])
        ends = [row.index(end) + 1 if end in row else len(row) for row in tokens]
        lengths = torch.tensor(ends if self._text.masked else [longest] * len(tokens))
        prepare_component(self._model, "text_encoder", ranks=1)
        message = EncodeText(
            model=self.handle.spec, layer=self._layer, adapters=self.changes.adapters, overlay=self.changes.overlay
        )
        answer = self.handle.call(message, {"ids": ids, "lengths": lengths})
        self.handle.show("ready")
        return answer["embeds"], None

    def load_sd(self, sd: Any) -> NoReturn:
        """Refuse weights: they come from the checkpoint only.

        Raises:
            InvalidRequest: always.
        """
        raise InvalidRequest("weights cannot be loaded into this text encoder: it lives in the backend's processes")


def _weights(checkpoint: Checkpoint) -> MetaWeights:
    """Return names and shapes of the weights, from the headers of the checkpoint's files.

    None if they cannot be read: whoever encodes is told why.
    """
    try:
        stored = checkpoint.stored("text_encoder") if "text_encoder" in checkpoint.components else None
        read = weights_under(stored.prefix, read_files(stored.files)) if stored else {}
    except InvalidRequest:
        read = {}
    tensors = {name: torch.empty(each.shape, device="meta") for name, each in read.items()}
    linear = {name for name, tensor in tensors.items() if tensor.ndim == 2 and name.endswith(".weight")}
    return MetaWeights(tensors=tensors, linear=frozenset(name for name in linear if not name.endswith(_LOOKED_UP)))


_LOOKED_UP = ("shared.weight", "embed_tokens.weight", "attention_bias.weight")
"""Ends of the names of tables whose rows are looked up."""


def special_tokens(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the ids of the end and the padding token, by default T5's."""
    config = checkpoint.config("text_encoder") if "text_encoder" in checkpoint.components else {}
    return {"end": config.get("eos_token_id", 1), "pad": config.get("pad_token_id", 0)}


def backend_clip(handle: Handle, text: BackendText, model: RemotePatcher) -> comfy.sd.CLIP:
    """Return a plain ``comfy.sd.CLIP``. Its ``clone`` creates that class, so a subclass would be lost."""
    clip = comfy.sd.CLIP(no_init=True)
    clip.cond_stage_model = RemoteTextEncoder(handle, text, model)
    clip.tokenizer = PromptTokenizer(handle.checkpoint, text)
    cpu = torch.device("cpu")
    clip.patcher = TextPatcher(clip.cond_stage_model, load_device=cpu, offload_device=cpu)
    clip.patcher.hook_mode = comfy.hooks.EnumHookMode.MinVram
    clip.patcher.is_clip = True
    clip.apply_hooks_to_conds = None
    clip.layer_idx = None
    clip.use_clip_schedule = False
    clip.tokenizer_options = {}
    return clip
