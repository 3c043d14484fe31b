"""The audit of a ledger: it checks that a run lost and repeated no sample."""
