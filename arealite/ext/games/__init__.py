"""Games: boards, dilemmas, and texts to reverse."""
