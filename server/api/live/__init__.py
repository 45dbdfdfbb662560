"""What the server is doing now: open requests, events, and sums of ended requests."""
