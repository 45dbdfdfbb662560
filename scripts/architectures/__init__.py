"""Tries every architecture of mlx-lm, built tiny, on what the server needs of a model."""
