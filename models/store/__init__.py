"""Our own names for models: what each stands for, and what requests under it get where they say nothing."""
