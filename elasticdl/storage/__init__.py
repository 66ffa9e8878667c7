"""Storage that URLs name (s3://, https://, …): a port of six verbs, its adapter over fsspec, files read by ranges."""
