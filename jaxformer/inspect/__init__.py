"""Looking at a model: probes that read, and reports that print. Nothing here is in the training step."""

from jaxformer.inspect.attention import attention_entropy, attention_maps
from jaxformer.inspect.autopsy import first_non_finite
from jaxformer.inspect.gradients import GradientReport, gradient_report

__all__ = ["GradientReport", "attention_entropy", "attention_maps", "first_non_finite", "gradient_report"]
