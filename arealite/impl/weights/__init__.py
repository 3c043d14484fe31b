"""Transfer of weights from a trainer to servers."""
