"""One parameter server process: its state, the calls that change it, and its communication with the master."""
