"""SGLang servers of this host."""
