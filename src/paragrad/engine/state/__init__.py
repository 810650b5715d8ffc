"""State of models and of Python that is copied, compared and restored."""
