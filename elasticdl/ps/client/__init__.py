"""What a worker uses of the parameter servers."""
