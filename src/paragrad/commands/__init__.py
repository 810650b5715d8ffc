"""The functions and commands that users call."""
