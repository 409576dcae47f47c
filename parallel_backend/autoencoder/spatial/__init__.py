"""A VAE's planes cut by rows over ranks, exactly: what each layer does there, and what is refused."""

from .layers import split
from .rows import Rows
from .watch import Unsplittable

__all__ = ["Rows", "Unsplittable", "split"]
