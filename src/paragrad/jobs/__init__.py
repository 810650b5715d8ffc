"""The Job, its loss, the built-in jobs, and how a job is found by name."""
