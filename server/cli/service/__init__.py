"""`mlx-serve service`: a server that starts when its user logs in."""
