"""A worker of an AllReduce job: its membership in groups, steps, batches and model."""
