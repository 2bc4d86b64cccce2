"""Plugins: the manifest, discovery, the registry and hooks."""
