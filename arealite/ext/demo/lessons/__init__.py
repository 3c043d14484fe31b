"""Lessons for a small pretrained model: each module has one `LESSON`."""
