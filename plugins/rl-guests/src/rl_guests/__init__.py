"""Verified refits in libraries that choose how weights travel by a name in a registry."""
