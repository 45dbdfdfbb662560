"""Local names of models: what each stands for, and defaults for requests under it."""
