"""Adapter of the port `Cluster`: processes of this machine, owned by an agent."""
