"""Random draws of a model that do not depend on how the batch is divided."""
