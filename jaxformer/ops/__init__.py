"""Pure functions on one example: no Flax, no state, no batch axis (`jax.vmap` adds one)."""
