"""Random input for everything that reads what others wrote: no crash, no hang, no traceback, nothing silently wrong.

Each change runs a short form of these tests, `make fuzz` the whole one.  Both are seeded: a failure comes again.
"""
