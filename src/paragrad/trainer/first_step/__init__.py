"""The comparison of the first step with one worker's, before its update."""
