"""Values that master, worker, PS and readers share.  Imports the standard library alone."""
