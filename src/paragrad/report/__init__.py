"""What a user sees: tables and progress."""
