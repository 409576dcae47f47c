"""The interface of a family's bridge, and what all bridges share."""
