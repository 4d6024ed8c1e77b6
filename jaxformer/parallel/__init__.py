"""Parallel training: the mesh, processes, memory and determinism."""
