"""The export of a trained model, in a process of its own where the model is large."""
