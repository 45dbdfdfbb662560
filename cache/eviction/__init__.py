"""Eviction when memory is short: the value of state, and the order."""
