"""Endpoints of our own: the cache, its sessions, health, the console."""
