"""Everything that a strategy runs inside a rank: one folder per family."""
