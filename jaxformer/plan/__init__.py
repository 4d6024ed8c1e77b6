"""Cost of a training step, from its compiled program: memory, FLOPs, communication, estimated time."""

from jaxformer.plan.plan import Plan, describe, make_plan

__all__ = ["Plan", "describe", "make_plan"]
