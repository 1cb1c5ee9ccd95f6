"""Families of models: config.json -> the caches of their layers. Architectures that are not listed are not known."""
