"""Model inspection: captures, interventions, measurements and reports. None of it runs in the training step."""

from jaxformer.inspect.activations import capture, capture_gradients, capture_shapes, intervene
from jaxformer.inspect.alignments import alignment, draw_alignment
from jaxformer.inspect.attention import attention_entropy, attention_maps, named_attention_maps
from jaxformer.inspect.autopsy import Autopsy, first_non_finite, save_autopsy
from jaxformer.inspect.explanations import TokenExplanation, explain
from jaxformer.inspect.gradients import (
    GradientReport,
    PerExampleGradients,
    gradient_report,
    gradients_by_position,
    per_example_gradients,
)
from jaxformer.inspect.heads import ablate_heads, ablation_loss, head_statistics
from jaxformer.inspect.init_check import check_init
from jaxformer.inspect.patching import attribution_patching, patch_activations
from jaxformer.inspect.property_checks import Check, verify
from jaxformer.inspect.residual_stream import logit_attribution, logit_lens
from jaxformer.inspect.routing import router_report
from jaxformer.inspect.softmax_saturation import saturation

__all__ = [
    "Autopsy", "Check", "GradientReport", "PerExampleGradients", "TokenExplanation", "ablate_heads", "ablation_loss",
    "alignment", "attention_entropy", "attention_maps", "attribution_patching", "capture", "capture_gradients",
    "capture_shapes", "check_init", "draw_alignment", "explain", "first_non_finite", "gradient_report",
    "gradients_by_position", "head_statistics", "intervene", "logit_attribution", "logit_lens", "named_attention_maps",
    "patch_activations", "per_example_gradients", "router_report", "saturation", "save_autopsy", "verify",
]  # fmt: skip
