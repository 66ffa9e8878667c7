"""Keras models for tables, described by parameters instead of code: the estimators of `elasticdl sql`."""
