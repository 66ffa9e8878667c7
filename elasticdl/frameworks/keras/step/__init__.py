"""Compiled functions for training steps."""
