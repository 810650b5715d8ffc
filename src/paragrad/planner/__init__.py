"""What a training will cost: the work and depth of a model, machines, prices."""
