"""Why a prompt was not reused: the comparison of requests, for the server and for recordings."""
