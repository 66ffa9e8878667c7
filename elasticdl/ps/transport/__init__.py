"""Frames of tensor calls and the sockets that carry them."""
