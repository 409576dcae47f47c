"""ComfyUI's CLIP class with our tokenizer and the backend's text encoder inside.

Prompt weights, escapes and padding are ComfyUI's own code: only the ids come from the checkpoint's
``tokenizer.json`` and only the forward runs elsewhere.
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

from ...parallel_backend.checkpoint.checkpoint import Checkpoint
from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.protocol.messages import EncodeText
from ..backend.connection import Handle
from ..bridges.bridge import BackendText
from .patcher import RemotePatcher, enter
from .preflight import check_part

Pair = tuple[int, float]


class _Words:
    """The checkpoint's tokenizer, as ``SDTokenizer`` wants to call it. Read at the first prompt."""

    def __init__(self, file: str) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(file)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    @classmethod
    def from_pretrained(cls, path: str) -> "_Words":
        return cls(path)

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": self._tokenizer.encode(text).ids}

    def get_vocab(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())


class PromptTokenizer:
    """Prompts to weighted ids, padded to the family's length; longer prompts stay whole, as in ComfyUI."""

    def __init__(self, checkpoint: Checkpoint, text: BackendText) -> None:
        self._checkpoint, self._text = checkpoint, text
        self._native: comfy.sd1_clip.SDTokenizer | None = None

    def tokenize_with_weights(self, text: str, return_word_ids: bool = False, **kwargs: Any) -> dict[str, Any]:
        """``{key: [[(id, weight), ...]]}`` (with word ids on request).

        Raises:
            InvalidRequest: no text encoder or tokenizer, or a textual inversion in the prompt.
        """
        if "embedding:" in text:
            raise InvalidRequest("the prompt names an embedding:..., and textual inversions are not supported here")
        return {self._text.key: self._load().tokenize_with_weights(text, return_word_ids, **kwargs)}

    def untokenize(self, pairs: Sequence[Pair]) -> list[Any]:
        """Each pair with its token's text."""
        return list(self._load().untokenize(pairs))

    def state_dict(self) -> NoReturn:
        """What saving a CLIP asks for.

        Raises:
            InvalidRequest: always.
        """
        raise InvalidRequest("this CLIP cannot be saved: its weights live in the backend's processes")

    def _load(self) -> comfy.sd1_clip.SDTokenizer:
        if self._native is None:
            check_part(self._checkpoint, 1)
            folder = self._checkpoint.path / "tokenizer"
            known = {"tokenizer.json": _Words, "spiece.model": SPieceTokenizer}
            found = [name for name in known if (folder / name).is_file()]
            if not found:
                raise InvalidRequest(f"{self._checkpoint.path.name} has neither of tokenizer/{' and '.join(known)}")
            self._native = comfy.sd1_clip.SDTokenizer(
                str(folder / found[0]),
                tokenizer_class=known[found[0]],
                has_start_token=False,
                pad_with_end=False,
                pad_token=special_tokens(self._checkpoint)["pad"],
                pad_to_max_length=False,
                max_length=99999999,
                min_length=self._text.length,
                embedding_key=self._text.key,
            )
        return self._native


class RemoteTextEncoder(torch.nn.Module, comfy.sd1_clip.ClipTokenWeightEncoder):  # type: ignore[misc]
    """The text encoder as ``comfy.sd.CLIP`` calls it. ``model`` is the patcher of the same checkpoint's MODEL."""

    def __init__(self, handle: Handle, text: BackendText, model: RemotePatcher) -> None:
        super().__init__()
        self.handle, self._text, self._model = handle, text, model
        self.dtypes: set[torch.dtype] = set()
        self._layer = -1
        self.special_tokens = special_tokens(handle.checkpoint)

    def reset_clip_options(self) -> None:
        """Back to the last layer."""
        self._layer = -1

    def set_clip_options(self, options: dict[str, Any]) -> None:
        """Take CLIPSetLastLayer's ``layer``; the other options are about pooled outputs and devices."""
        layer = options.get("layer")
        self._layer = self._layer if layer is None else layer

    def encode_token_weights(self, token_weight_pairs: dict[str, list[list[Pair]]]) -> Any:
        """Embeddings ``[1, L, D]`` and no pooled output; weights by ComfyUI's own formula."""
        return super().encode_token_weights(token_weight_pairs[self._text.key])

    def encode(self, tokens: list[list[int]]) -> tuple[Tensor, None]:
        """Embeddings ``[N, L, D]`` of ``N`` padded prompts, zero after each one's end token where padding is masked."""
        check_part(self.handle.checkpoint, 1)
        longest = max(map(len, tokens))
        pad, end = self.special_tokens["pad"], self.special_tokens["end"]
        ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in tokens])
        ends = [row.index(end) + 1 if end in row else len(row) for row in tokens]
        lengths = torch.tensor(ends if self._text.masked else [longest] * len(tokens))
        enter(self._model, "text_encoder", ranks=1)
        done = self.handle.call(EncodeText(model=self.handle.spec, layer=self._layer), {"ids": ids, "lengths": lengths})
        self.handle.show("ready")
        return done["embeds"], None

    def load_sd(self, sd: Any) -> NoReturn:
        """Weights come from the checkpoint only.

        Raises:
            InvalidRequest: always.
        """
        raise InvalidRequest("weights cannot be loaded into this text encoder: it lives in the backend's processes")


def special_tokens(checkpoint: Checkpoint) -> dict[str, int]:
    """Ids of the end and the padding token; T5's own where the config is silent."""
    config = checkpoint.config("text_encoder") if "text_encoder" in checkpoint.components else {}
    return {"end": config.get("eos_token_id", 1), "pad": config.get("pad_token_id", 0)}


def backend_clip(handle: Handle, text: BackendText, model: RemotePatcher) -> comfy.sd.CLIP:
    """A plain ``comfy.sd.CLIP``: its ``clone`` makes that class, so a subclass would be lost."""
    clip = comfy.sd.CLIP(no_init=True)
    clip.cond_stage_model = RemoteTextEncoder(handle, text, model)
    clip.tokenizer = PromptTokenizer(handle.checkpoint, text)
    cpu = torch.device("cpu")
    clip.patcher = RemotePatcher(clip.cond_stage_model, load_device=cpu, offload_device=cpu)
    clip.patcher.hook_mode = comfy.hooks.EnumHookMode.MinVram
    clip.patcher.is_clip = True
    clip.apply_hooks_to_conds = None
    clip.layer_idx = None
    clip.use_clip_schedule = False
    clip.tokenizer_options = {}
    return clip
