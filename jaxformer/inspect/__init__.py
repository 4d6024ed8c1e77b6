"""Model inspection: captures, interventions, measurements and reports. None of it runs in the training step."""

from jaxformer.inspect.activations import (
    capture,
    capture_gradients,
    capture_shapes,
    capturing,
    gradient_of,
    intervene,
    run_from,
)
from jaxformer.inspect.alignments import alignment, draw_alignment
from jaxformer.inspect.attention import attention_entropy, attention_maps, named_attention_maps
from jaxformer.inspect.autopsy import Autopsy, first_non_finite, save_autopsy
from jaxformer.inspect.curvature import (
    gauss_newton_product,
    hessian_product,
    largest_eigenvalues,
    nesterov_limit,
    sharpness,
)
from jaxformer.inspect.explanations import TokenExplanation, explain
from jaxformer.inspect.gradients import (
    GradientReport,
    PerExampleGradients,
    gradient_report,
    gradients_by_position,
    per_example_gradients,
)
from jaxformer.inspect.heads import ablate_heads, ablation_loss, head_statistics, patched_back, singular_values
from jaxformer.inspect.influence import Replay
from jaxformer.inspect.init_check import check_init
from jaxformer.inspect.lenses import agreement, backward_lens, jacobian_lens, lens_logits, regression_lens
from jaxformer.inspect.patching import attribution_patching, patch_activations
from jaxformer.inspect.paths import Edge, path_attribution
from jaxformer.inspect.property_checks import Check, verify
from jaxformer.inspect.residual_stream import logit_attribution, logit_lens
from jaxformer.inspect.routing import router_report
from jaxformer.inspect.softmax_saturation import saturation

__all__ = [
    "Autopsy", "Check", "Edge", "GradientReport", "PerExampleGradients", "Replay", "TokenExplanation",
    "ablate_heads", "ablation_loss", "agreement", "alignment", "attention_entropy", "attention_maps",
    "attribution_patching", "backward_lens", "capture", "capture_gradients", "capture_shapes", "capturing",
    "check_init", "draw_alignment", "explain", "first_non_finite", "gauss_newton_product",
    "gradient_of", "gradient_report", "gradients_by_position", "head_statistics", "hessian_product", "intervene",
    "jacobian_lens", "largest_eigenvalues", "lens_logits", "logit_attribution", "logit_lens",
    "named_attention_maps", "nesterov_limit", "patch_activations", "patched_back", "path_attribution",
    "per_example_gradients", "regression_lens", "router_report", "run_from", "saturation", "save_autopsy",
    "sharpness", "singular_values", "verify",
]  # fmt: skip
