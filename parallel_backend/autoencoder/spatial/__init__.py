"""Exact decode and encode by a VAE whose tensors are split by rows over ranks.

Each rank holds a block of consecutive rows of every tensor: of the latent, of every feature map and of the pixels. All
tensors are split in the proportions of the latent's rows, so blocks stay where they are from the first layer to the
last (``rows``). What a layer needs beyond its rank's block depends on its kind (``layers``):

- Activations, norms over channels, linear layers, nearest-neighbour upsampling and attention over time compute each
  row from itself. They run unchanged, and nothing is sent.
- A convolution reads a few rows above and below each row of its output. Each rank receives just those rows of its
  neighbours, the halo (``windows``).
- A GroupNorm needs mean and variance over all rows. Each rank sends its block's, and every rank merges them
  (``norms``).
- Attention over the pixels of a frame needs the keys and values of all rows. Ring attention passes them from rank to
  rank while queries stay (``plane``).

In each case a rank computes, for its rows, the function that one rank computes for all rows. Only the order of
floating-point sums differs. Nothing is blended at the boundaries, and no feature map is ever gathered.

``split`` replaces the ``forward`` of the layers for the time of a decode or encode. A layer that it does not know, or a
function between layers that may read other rows (``watch``), raises ``Unsplittable``; then one rank computes alone.
``formula`` predicts the bytes that each rank sends.
"""

from .layers import split
from .rows import RowSplit
from .watch import Unsplittable

__all__ = ["RowSplit", "Unsplittable", "split"]
