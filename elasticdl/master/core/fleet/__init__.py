"""Pods, servers and workers: their reports, the causes of their ends, and their replacement."""
