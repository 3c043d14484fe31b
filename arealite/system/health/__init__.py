"""Who waits for whom, until when, and who holds a run up."""
