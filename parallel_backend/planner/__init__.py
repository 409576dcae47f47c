"""Predicts how long a prompt takes in each layout, and chooses one, with reasons."""
