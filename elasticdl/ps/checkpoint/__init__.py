"""The format of one parameter server's part of a checkpoint."""
