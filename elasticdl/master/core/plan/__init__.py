"""The plan of a job: its data, epochs and tasks, evaluation rounds, and decisions for callbacks."""
