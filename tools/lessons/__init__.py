"""Lessons: what a tiny model learns in minutes on a CPU; one file each, with a LESSON."""
