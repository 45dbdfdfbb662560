"""The models of one server process: which are loaded, and which make way for others."""
