"""Extensions: each folder is one option of several, and enters through `entries.toml` alone."""
