"""What is evicted when memory is short: by what value, in which order."""
