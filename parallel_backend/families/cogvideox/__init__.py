"""CogVideoX."""
