"""The compiled functions of a training step."""
