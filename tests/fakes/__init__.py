"""Stand-ins for servers, for tests of the parts that talk to them."""
