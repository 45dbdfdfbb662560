"""Why a prompt was not reused: one comparison of requests, for the running server and for recorded requests."""
