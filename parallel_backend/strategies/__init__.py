"""The registry of strategies. To add one, add a file here and an entry to ``STRATEGIES``."""

from ..interfaces.strategy import Strategy, Workload
from .batch import BatchSplit
from .dsp import Dsp
from .pipe import Pipe
from .ring import Ring
from .sequence import SequenceSplit
from .sharded_weights import ShardedWeights
from .tensor import TensorParallel
from .token_split import TokenSplit
from .ulysses import Ulysses
from .whole_queries import WholeQueries

STRATEGIES: tuple[Strategy, ...] = (
    BatchSplit(), Pipe(), SequenceSplit(), Ring(), Ulysses(), WholeQueries(), Dsp(), TensorParallel(), ShardedWeights(),
)  # fmt: skip

__all__ = ["STRATEGIES", "BatchSplit", "Strategy", "TokenSplit", "Workload"]
