"""Plugins: the manifest, discovery, the registry, configuration checks, hooks and the factory."""
