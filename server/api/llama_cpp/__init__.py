"""llama.cpp's endpoints for completions, tokens, templates and the state of the server."""
