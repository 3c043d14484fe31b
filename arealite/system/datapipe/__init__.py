"""The datapipe: the process that leases tasks to workers and serves batches to the trainer."""
