"""MiniMax-H3."""
