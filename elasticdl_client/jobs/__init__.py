"""Commands after submission: list, status, logs, delete, clean and resume, for jobs of both runtimes."""
