"""What a run writes of itself, and its reading."""
