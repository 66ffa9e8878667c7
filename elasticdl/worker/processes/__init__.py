"""Several processes in the pod of a worker, one for each of its GPUs."""
