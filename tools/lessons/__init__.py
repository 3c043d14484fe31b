"""Lessons: tasks that a tiny model learns in minutes on a CPU. Each module defines a LESSON."""
