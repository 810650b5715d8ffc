"""One rank's training: settings, the door, the step and its proof, batches, evaluation,
checkpoints, the loop.
"""
