"""Where families and strategies meet: ``State``, ``Geometry``, ``Family`` and ``Strategy``, with no code of either."""
