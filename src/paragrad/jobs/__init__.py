"""Built-in jobs, and finding the job a user names."""

from paragrad.jobs.finding import JOBS, find, job

__all__ = ["JOBS", "find", "job"]
