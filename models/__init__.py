"""Tokens to logits and text to tokens: loading, templates, sampling, ragged decoding."""
