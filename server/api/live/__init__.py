"""What the server is doing now: open requests, events, and the sums of those that have ended."""
