"""Client packages and coding agents as people install them, run against this server: `python -m scripts.clients`."""
