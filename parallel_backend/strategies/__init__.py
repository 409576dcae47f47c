"""The registry of strategies. Adding one is a file here and a row below."""

from .base import Job, Strategy
from .batch import BatchSplit
from .ulysses import Ulysses

STRATEGIES: tuple[Strategy, ...] = (BatchSplit(), Ulysses())

__all__ = ["STRATEGIES", "BatchSplit", "Job", "Strategy", "Ulysses"]
