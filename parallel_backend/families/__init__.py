"""Families of transformers: a folder each, with its files' names and its diffusers class in parts."""
