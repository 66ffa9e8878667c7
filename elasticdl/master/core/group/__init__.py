"""The groups of an AllReduce job: which workers form the next one, and for what reason."""
