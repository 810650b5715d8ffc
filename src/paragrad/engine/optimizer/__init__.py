"""What the engine needs to know about an optimizer, and how its state is divided."""
