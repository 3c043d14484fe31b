"""Guards and limits of HTTP servers in AReaLite processes."""
