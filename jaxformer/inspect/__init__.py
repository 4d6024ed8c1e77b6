"""Looking at a model: probes that read, and reports that print. Nothing here is in the training step."""

from jaxformer.inspect.alignment import alignment, draw_alignment
from jaxformer.inspect.attention import attention_entropy, attention_maps, named_attention_maps
from jaxformer.inspect.autopsy import Autopsy, first_non_finite, save_autopsy
from jaxformer.inspect.explain import Explained, explain
from jaxformer.inspect.gradients import ExampleGradients, GradientReport, example_gradients, gradient_report
from jaxformer.inspect.heads import ablate_heads, head_statistics, loss_without
from jaxformer.inspect.init_check import check_init
from jaxformer.inspect.residual_stream import logit_attribution, logit_lens, patch
from jaxformer.inspect.routing import router_report
from jaxformer.inspect.saturation import saturation
from jaxformer.inspect.trace import editing, trace, trace_gradients, trace_names
from jaxformer.inspect.verify import Check, verify

__all__ = [
    "Autopsy",
    "Check",
    "ExampleGradients",
    "Explained",
    "GradientReport",
    "ablate_heads",
    "alignment",
    "attention_entropy",
    "attention_maps",
    "check_init",
    "draw_alignment",
    "editing",
    "example_gradients",
    "explain",
    "first_non_finite",
    "gradient_report",
    "head_statistics",
    "logit_attribution",
    "logit_lens",
    "loss_without",
    "named_attention_maps",
    "patch",
    "router_report",
    "saturation",
    "save_autopsy",
    "trace",
    "trace_gradients",
    "trace_names",
    "verify",
]
