"""One rank's training: settings, batches, the step and its check, evaluation, checkpoints."""
