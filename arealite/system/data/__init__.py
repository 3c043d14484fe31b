"""Rows, tasks, tokens of chats, and samples."""
