"""``rl refit bench``: how fast refits are on this host, next to plain copies."""
