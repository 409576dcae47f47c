"""Single denoiser calls of every family, layout and checkpoint, compared with diffusers' own forward."""
