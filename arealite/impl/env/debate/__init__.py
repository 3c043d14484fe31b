"""Two seats argue, rules or a third seat judge."""
