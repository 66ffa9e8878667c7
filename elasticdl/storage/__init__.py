"""Object storage, named by URLs (s3://, https://, …): a port, its adapter over fsspec, and files read by ranges."""
