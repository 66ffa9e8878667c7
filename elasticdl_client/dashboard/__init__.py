"""`elasticdl dashboard`: a page of all jobs that the client can see, served from where the client runs."""
