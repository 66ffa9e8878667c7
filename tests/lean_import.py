"""The first lines of programs of tests that import TensorFlow: they halve the processor time of that import."""

# What a worker's Keras does without, too (`elasticdl.cluster.local.framework_import`), for programs without elasticdl.
LEAN_IMPORT = """
import gc, sys
gc.disable()
for package in ("matplotlib", "pandas", "sklearn"):
    sys.modules[package] = None
"""
