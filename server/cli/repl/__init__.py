"""What `mlx-serve run` is made of: a keyboard, a screen, and who answers."""
