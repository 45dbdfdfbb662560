"""The process: settings, routes, connections, memory, keys, log."""
