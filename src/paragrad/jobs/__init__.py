"""The Job, its loss, the built-in ones, and finding the one a user names."""
