"""The API for the user's own modules and scripts; layers are in `elasticdl.layers`."""
