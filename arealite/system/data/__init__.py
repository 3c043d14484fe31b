"""Datasets: rows, tasks, tokenized chats, and samples."""
