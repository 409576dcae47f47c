"""What a folder in diffusers layout holds, from its JSON alone. No torch."""
