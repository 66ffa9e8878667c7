"""The API of the user's own modules and scripts, beside the layers."""
