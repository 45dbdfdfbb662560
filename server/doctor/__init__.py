"""`mlx-serve doctor`: which text keeps a client's prompts from being reused, and what to do about it."""
