"""Errors of the process as a whole, told to the person who started it in one sentence.

StartError    the server cannot start: its port is taken, its address is not ours, ...
DoctorError   there is nothing to examine: no server there, another program, a file that cannot be read
"""


class StartError(Exception):
    """The server cannot start. The message is one sentence for a person."""


class DoctorError(Exception):
    """`mlx-serve doctor` has nothing to examine. The message is one sentence for a person."""
