"""A rank of a backend of several machines, started as ``python -m parallel_backend.rank`` is on one machine."""

from ...rank.__main__ import main
from .elsewhere import find

if __name__ == "__main__":
    main(elsewhere=find)
