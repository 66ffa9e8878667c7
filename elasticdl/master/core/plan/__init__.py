"""The plan of a job: its data, epochs and tasks, the rounds of its evaluation, and the decisions for callbacks."""
