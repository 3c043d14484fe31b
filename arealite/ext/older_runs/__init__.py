"""Ledgers of earlier versions, for audit, report and replay."""
