"""The contract's entries by subject. One block for each module of ComfyUI."""
