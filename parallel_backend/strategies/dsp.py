"""Dynamic sequence parallelism (DSP, https://arxiv.org/abs/2403.10266): tokens of all frames for whole frames.

In models whose frames attend only to themselves, a frame is a row of the batch. Outside of that attention, each rank
holds some of the tokens of all rows; inside, some of the rows with all tokens. It exchanges what goes into the
attention module and what comes out of it, so it sends half of what Ulysses sends, which exchanges q, k and v. Heads are
not involved. Neither the number of rows nor that of tokens need be divisible by the number of ranks. Exact.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..distributed.collectives import start_all_to_all, wait_all
from ..distributed.mesh import Axis
from ..errors import BackendFailure, InvalidRequest
from ..interfaces.strategy import Workload
from ..layout.parallel_layout import ParallelLayout
from ..layout.partition import Partition
from ..layout.split import Split


class Dsp:
    """Exchanges tokens for rows around modules that attend within frames."""

    axes = ("dsp",)

    def check(self, layout: ParallelLayout, workload: Workload) -> None:
        """Refuse models in which tokens attend across frames.

        Raises:
            InvalidRequest: the model has such attention.
        """
        if layout.dsp > 1 and not workload.geometry.within_frames:
            raise InvalidRequest(
                f"layout dsp={layout.dsp}: tokens of this model attend to all frames, and dsp gives ranks whole frames"
            )

    def bytes_sent(self, layout: ParallelLayout, workload: Workload, rank: int) -> int:
        """Count, for each attention, what this rank sends of its tokens before it, and of its rows after it."""
        if layout.dsp == 1:
            return 0
        place, geometry = layout.coordinates(rank), workload.geometry
        values = 0
        for samples, extent in workload.batches(layout, place).values():
            rows = samples * extent.rows
            own_rows = Split.of(layout).frames(rows).sizes[place["dsp"]]
            for site, count in workload.sites(layout, place):
                (stream,) = site.streams
                tokens = extent.streams[stream]
                own_tokens = workload.tokens_by_rank(layout, extent, stream)[place["sequence"]]
                sent = own_tokens * (rows - own_rows) + own_rows * (tokens - own_tokens)
                values += count * geometry.width(stream) * sent
        return values * workload.itemsize


class RowsAttention:
    """An attention module's ``forward`` over the rows of this rank, with the tokens of all ranks of the axis.

    Args:
        axis: the ranks that exchange tokens for rows.
        tokens: number of tokens of each rank.
        split: shares the rows.
        forward: of the module.
    """

    def __init__(self, axis: Axis, tokens: Partition, split: Split, forward: Callable[..., Tensor]) -> None:
        self.axis, self.tokens, self.split, self.forward = axis, tokens, split, forward

    def __call__(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """``[rows, local tokens, width]`` to the same. A row of padding on a rank without tokens becomes zeros.

        Raises:
            BackendFailure: the module is given more, which would have to be exchanged, too.
        """
        if given := [name for name, value in options.items() if value is not None]:
            raise BackendFailure(f"attention within frames was called with {', '.join(given)}, which is not supported")
        rows, _, width = hidden_states.shape
        local = self.tokens.sizes[self.axis.index]
        shares = self.split.frames(rows)
        whole = self._to_rows(hidden_states[:, :local], shares)
        out = self._to_tokens(self.forward(whole) if len(whole) else whole, shares)
        padding = hidden_states.shape[1] - local
        return torch.cat([out, out.new_zeros(rows, padding, width)], dim=1) if padding else out

    def _to_rows(self, hidden: Tensor, rows: Partition) -> Tensor:
        """Exchange ``[rows, local tokens, width]`` for ``[local rows, tokens, width]``."""
        own, (_, local, width) = rows.sizes[self.axis.index], hidden.shape
        receive_sizes = [own * tokens * width for tokens in self.tokens.sizes]
        received = self._exchange(hidden, [size * local * width for size in rows.sizes], receive_sizes)
        parts = zip(received.split(receive_sizes), self.tokens.sizes, strict=True)
        return torch.cat([part.view(own, tokens, width) for part, tokens in parts], dim=1)

    def _to_tokens(self, out: Tensor, rows: Partition) -> Tensor:
        """Exchange ``[local rows, tokens, width]`` for ``[rows, local tokens, width]``."""
        own, _, width = out.shape
        local = self.tokens.sizes[self.axis.index]
        sent = torch.cat([part.reshape(-1) for part in out.split(self.tokens.sizes, dim=1)])
        send_sizes = [own * tokens * width for tokens in self.tokens.sizes]
        received = self._exchange(sent, send_sizes, [size * local * width for size in rows.sizes])
        return received.view(rows.total, local, width)

    def _exchange(self, values: Tensor, send_sizes: list[int], receive_sizes: list[int]) -> Tensor:
        received = values.new_empty(sum(receive_sizes))
        wait_all(start_all_to_all(values.contiguous(), send_sizes, received, receive_sizes, self.axis))
        return received
