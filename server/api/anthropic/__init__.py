"""Anthropic's dialect: the Messages API, as its packages and Claude Code speak it."""
