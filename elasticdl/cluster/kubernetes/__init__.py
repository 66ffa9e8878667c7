"""The adapter of the port `Cluster` for the pods of a Kubernetes namespace."""
