"""Compares what models say of images with what transformers has them say."""
