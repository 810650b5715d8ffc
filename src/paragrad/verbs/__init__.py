"""What users call: train, compare, verify, parallelize, hook, and the command line."""
