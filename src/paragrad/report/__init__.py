"""What a user sees: tables, pages, charts and progress."""
