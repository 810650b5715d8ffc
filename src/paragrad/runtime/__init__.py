"""The ranks of a training: world, rendezvous, launcher variables, mesh, signals."""
