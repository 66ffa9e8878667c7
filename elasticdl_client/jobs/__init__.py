"""What comes after submission: `elasticdl list`, `status`, `logs`, `delete`, `clean` and `resume`, for both runtimes."""
