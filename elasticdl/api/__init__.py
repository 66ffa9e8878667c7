"""What the user's own modules and scripts import of elasticdl, beside its layers."""
