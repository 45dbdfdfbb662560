"""The models of one server process: which are loaded, which may be, and what makes way for what."""
