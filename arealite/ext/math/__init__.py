"""Mathematical questions, generated or from files."""
