"""How the shipped "shapes" checkpoint is made: scenes, VAE, transformer, export."""
