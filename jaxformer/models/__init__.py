"""Whole networks, one file each: a config and the module it builds.

A file here with a subclass of `jaxformer.config.ModelConfig` is all it takes to add a model.
"""
