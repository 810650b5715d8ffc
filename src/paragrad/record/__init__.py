"""Writing and reading the record of a run."""
