"""What a person may ask of a layout that nobody names."""

MODES: tuple[str, ...] = ("auto", "fastest", "fit memory", "fit memory over slow links", "allow approximate")
AUTO, FASTEST, FIT, FIT_SLOW, APPROXIMATE = MODES
