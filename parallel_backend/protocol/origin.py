"""Where a request comes from in ComfyUI, so that the status can say what the ranks work on."""

from dataclasses import dataclass

from ..errors import InvalidRequest

MAX_NAME = 256
"""Characters of the name of a prompt or a node."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A node of a prompt.

    Attributes:
        prompt: the prompt's id in ComfyUI.
        node: the node's id in the workflow that the user sees.

    Raises:
        InvalidRequest: a name is too long or not printable.
    """

    prompt: str
    node: str = ""

    def __post_init__(self) -> None:
        for kind, name in (("prompt", self.prompt), ("node", self.node)):
            if len(name) > MAX_NAME or not name.isprintable():
                raise InvalidRequest(f"{kind} {name!r}: must have at most {MAX_NAME} printable characters")
