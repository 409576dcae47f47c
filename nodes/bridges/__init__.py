"""What a family's bridge is, and what all bridges share."""
