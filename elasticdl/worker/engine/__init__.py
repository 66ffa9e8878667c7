"""Decisions of a worker without threads, clocks and calls: events in, values out."""
