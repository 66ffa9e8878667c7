"""Trained models as files, and back."""
