"""The first lines of programs of tests that import TensorFlow: they halve the processor time of that import."""

# Imports not needed by a worker's Keras either (`elasticdl.cluster.local.standby`), without elasticdl.
LEAN_IMPORT = """
import gc, sys
gc.disable()
for package in ("IPython", "matplotlib", "pandas", "sklearn"):
    sys.modules[package] = None
"""
