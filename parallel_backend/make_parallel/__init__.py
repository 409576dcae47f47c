"""Puts Parallel Model and Parallel VAE behind every loader of a workflow, in the page's format or in API format.

It needs neither torch nor ComfyUI.
"""
