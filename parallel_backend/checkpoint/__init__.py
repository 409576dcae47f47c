"""Reading a model folder in diffusers layout from its JSON files only. No torch."""
