"""llama.cpp's endpoints for tokens, templates and the state of the server."""
