"""`mlx-serve launch`: a coding agent that asks this server, set up for one run of it."""
