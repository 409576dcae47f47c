"""Weights from files to this rank's device, whole or the part that a strategy leaves it."""
