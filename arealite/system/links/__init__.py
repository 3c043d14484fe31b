"""Links: the connections of rollout workers and trainer ranks to the datapipe."""
