"""Other people's environments, made to look like ours."""
