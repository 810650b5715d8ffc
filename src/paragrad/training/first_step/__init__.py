"""The first step is proved to be one worker's, before its update."""
