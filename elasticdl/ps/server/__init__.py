"""One parameter server process: its state, the calls that change it, its conversation with the master."""
