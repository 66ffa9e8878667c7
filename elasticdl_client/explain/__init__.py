"""Why a job is as it is: troubles, found in what is kept of it, each with its cause, its cost and its cure."""
