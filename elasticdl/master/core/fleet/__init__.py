"""Pods, servers and workers: their reports, the meaning of their ends, and their replacement."""
