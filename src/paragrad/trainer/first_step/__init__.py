"""The check of the first step against one worker, before the update."""
