"""ComfyUI's MODEL, CLIP and VAE whose weights live in the ranks."""
