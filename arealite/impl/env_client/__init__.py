"""An environment somewhere else, as a worker uses it: servers, sessions, children."""
