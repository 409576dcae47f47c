"""A whole prompt in a real ComfyUI, and where its time goes."""
