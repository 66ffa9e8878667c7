"""Save trained models to files, and load them."""
