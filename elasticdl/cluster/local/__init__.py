"""The adapter of the port `Cluster` for processes of this machine, owned by an agent."""
