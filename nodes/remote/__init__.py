"""ComfyUI's MODEL, CLIP and VAE for weights that live in the ranks."""
