"""Errors of the process as a whole, told to the person who started it in one sentence.

StartError    the server cannot start: its port is taken, its address is not ours, ...
"""


class StartError(Exception):
    """The server cannot start. The message is one sentence for a person."""
