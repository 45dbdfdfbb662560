"""The inference engine: requests in, typed events out. Knows no HTTP."""
