"""What people look at: the live panel, and the report of a run."""
