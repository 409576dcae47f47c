"""What became of a workflow: what was put where, and what stays as it is, with the reason."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["MODEL", "VAE"]
NODES: Mapping[Kind, str] = {"MODEL": "ParallelModel", "VAE": "ParallelVAE"}
"""The node that makes each kind of output parallel."""

Reason = Literal["already", "audio", "builtin", "inactive", "weights", "file", "text", "unknown"]
SENTENCES: Mapping[Reason, str] = {
    "already": "it is parallel already",
    "audio": "an audio VAE is small, and runs on one GPU",
    "builtin": "it loads no file of a VAE",
    "inactive": "it is muted or bypassed",
    "weights": "another node merges or saves its weights: put the node behind that one, if it makes a MODEL",
    "file": "{detail}",
    "text": "text encoders run once a prompt, on one GPU",
    "unknown": "nothing is known about this loader: if it loads a diffusion transformer, put the node behind it"
    " by hand",
}


@dataclass(frozen=True, kw_only=True)
class Loader:
    """A node that loads something.

    Attributes:
        node: its id.
        type: its class.
        title: what the user reads on it.
    """

    node: str
    type: str
    title: str


@dataclass(frozen=True, kw_only=True)
class Added:
    """A node that was put behind a loader.

    Attributes:
        loader: the loader.
        kind: of its output.
        node: the new node's id.
    """

    loader: Loader
    kind: Kind
    node: str

    def __str__(self) -> str:
        return f"{NODES[self.kind]} {self.node} behind {self.loader.title} (node {self.loader.node})"


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A loader's output that stays as it is.

    Attributes:
        loader: the loader.
        kind: of its output; "CLIP" for a text encoder.
        reason: why, see ``SENTENCES``.
        detail: what a sentence has in addition.
    """

    loader: Loader
    kind: str
    reason: Reason
    detail: str = ""

    def __str__(self) -> str:
        sentence = SENTENCES[self.reason].format(detail=self.detail)
        return f"{self.kind} of {self.loader.title} (node {self.loader.node}) stays as it is: {sentence}"


@dataclass(frozen=True, kw_only=True)
class Made:
    """A parallel workflow.

    Attributes:
        workflow: in the format of the given one, which is unchanged.
        added: what was put in.
        kept: what stays as it is.
    """

    workflow: Any
    added: tuple[Added, ...]
    kept: tuple[Kept, ...]
