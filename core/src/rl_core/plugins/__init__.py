"""Plugins: the manifest, discovery, the registry, hooks and the doctor."""
