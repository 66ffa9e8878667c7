"""A worker of an evaluate, predict or analyze job."""
