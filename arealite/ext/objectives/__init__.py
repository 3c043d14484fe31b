"""Further formulas of policy optimization, behind options of the algorithm."""
