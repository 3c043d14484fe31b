"""Who is where: names with heartbeats."""
