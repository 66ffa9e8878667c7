"""Leases, commits, the content of the model, and the cost of failures."""
