"""An HTTP service that the public `tinker` SDK speaks to."""
