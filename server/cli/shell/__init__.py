"""What shells and `man` are told of the commands, made of what `--help` is made of."""
