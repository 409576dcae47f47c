"""Loading weights from files to this rank's device: all of a model, or the part that a strategy assigns to the rank."""
