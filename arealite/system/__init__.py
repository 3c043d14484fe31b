"""Floor 3: I/O without maths: name registry, datapipe, ledger, transports, deadlines."""
