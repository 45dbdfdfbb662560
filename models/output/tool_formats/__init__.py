"""Formats of tool calls that mlx-lm has no parser for, one a file."""
