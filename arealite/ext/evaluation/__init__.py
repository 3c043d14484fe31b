"""`arealite eval` and `arealite collect`: sample tasks without a trainer."""
