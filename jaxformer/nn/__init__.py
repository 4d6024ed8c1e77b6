"""Flax Linen modules for one example: parameters wired around the functions of `jaxformer.ops`."""
