"""Whole jobs on a real Kubernetes whose node is this machine: `make e2e`."""
