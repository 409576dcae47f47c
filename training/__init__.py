"""Training of the shipped "shapes" checkpoint: scenes, VAE, transformer, export."""
