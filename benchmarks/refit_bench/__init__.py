"""How fast refits are on this host, next to plain copies."""
