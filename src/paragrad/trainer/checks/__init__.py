"""The comparison of steps with one worker's, before and after their updates."""
