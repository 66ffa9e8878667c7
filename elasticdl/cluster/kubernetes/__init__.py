"""Adapter of the port `Cluster`: pods of a Kubernetes namespace."""
