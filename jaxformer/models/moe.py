"""Config of decoders whose MLPs are mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from jaxformer.config.fields import NonNegativeFloat, Range, Size
from jaxformer.errors import UserError
from jaxformer.models.decoder import DecoderConfig
from jaxformer.nn.block import Make
from jaxformer.nn.execution import Execution
from jaxformer.nn.experts import Experts


@dataclass(frozen=True)
class MoEConfig(DecoderConfig):
    """Shape of a `Decoder` with a mixture of experts in each block (Shazeer et al. 2017)."""

    n_experts: Size | None = None
    """Experts per block, MLPs with hidden layers as wide as d_ff; by default, one MLP for all tokens."""
    experts_per_token: Size = 2
    """Experts that process each token."""
    renormalize_experts: bool | None = None
    """Normalise the weights of a token's experts to sum to 1; by default, true unless experts_per_token is 1."""
    capacity_factor: Annotated[float, Range(above=0, hint=", such as 1.25, or none to drop nothing")] | None = None
    """Capacity of an expert in training, as a multiple of its even share of tokens; by default no token is dropped,
    which is slower but exact."""
    shared_expert: bool = False
    """Additional expert in each block that processes all tokens."""
    balance_weight: NonNegativeFloat = 0.01
    """Weight of the load-balancing loss of each block."""
    router_z_weight: NonNegativeFloat = 0.001
    """Weight of the router z-loss of each block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_experts is None:
            if self.capacity_factor is not None or self.shared_expert:
                raise UserError("capacity_factor and shared_expert need experts; set n_experts to their number.")
        elif self.experts_per_token > self.n_experts:
            problem = f"experts_per_token is {self.experts_per_token}, but n_experts is {self.n_experts}"
            raise UserError(f"{problem}; use at most n_experts.")

    @property
    def routes_tokens(self) -> bool:
        return self.n_experts is not None

    def make_mlp(self, execution: Execution) -> Make:
        mlp = super().make_mlp(execution)
        if self.n_experts is None:
            return mlp
        return partial(
            Experts,
            make_expert=mlp,
            n_experts=self.n_experts,
            per_token=self.experts_per_token,
            capacity_factor=self.capacity_factor,
            shared_expert=self.shared_expert,
            shards=execution.expert_shards,
            renormalize=self.renormalize_experts,
        )
