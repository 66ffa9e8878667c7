"""Exports the trained model; a large one in a process of its own."""
