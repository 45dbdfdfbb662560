"""Ollama's dialect: one JSON object a line, options in an object of their own, times in nanoseconds."""
