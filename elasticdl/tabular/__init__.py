"""Keras models of tables that are described by parameters, not by code: the estimators of `elasticdl sql`."""
