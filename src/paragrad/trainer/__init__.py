"""One rank's training step: its setup, its state and the step."""
