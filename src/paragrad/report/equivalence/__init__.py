"""Is it the same training? A strategy compared with serial, step by step."""
