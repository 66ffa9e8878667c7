"""The input pipeline: from records through the user's `feed` to tensors."""
