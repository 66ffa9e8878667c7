"""The input pipeline: convert records to tensors by the user's `feed`."""
