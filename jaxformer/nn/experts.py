"""A mixture of experts with its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax

from jaxformer.nn.block import Make
from jaxformer.nn.capture import OUTPUT, capture_point, handled_by
from jaxformer.nn.execution import ROUTER
from jaxformer.nn.mlp import uniform_fan_in
from jaxformer.nn.parameters import parameter
from jaxformer.ops.experts import (
    RouterStatistics,
    assign,
    capacity,
    capacity_without_padding,
    combine,
    dispatch,
    route,
    route_in_groups,
    router_statistics,
)
from jaxformer.ops.precision import upcast

AXIS = "expert"
"""Mesh axis that splits experts."""


class Experts(nn.Module):
    """Mixture of experts: `(T, D)` to `(T, d_out)` (Shazeer et al. 2017).

    `W_router` `(D, E)` is the router. The parameters of `experts` are those of one MLP with an additional leading axis,
    `(E, …)`.

    Tokens beyond the capacity are dropped in training only, that is, if there is an rng named "dropout". In evaluation
    and sampling, the output for a token is independent of other tokens. Padding is sent to no expert.
    `RouterStatistics` are sown as "statistics" into the collection `ROUTER`, if that is mutable.

    Attributes:
      make_expert: function that constructs one expert.
      n_experts, per_token: number E of experts, and number J of experts per token.
      capacity_factor: see `ops.experts.capacity`.
      shared_expert: add one more expert, `shared`, for all tokens (Dai et al. 2024, section 3.2).
      make_shared: function that constructs it; None for `make_expert`.
      shared_gate: multiply its output by the sigmoid of a learned projection of the token, `W_shared_gate` `(D, 1)`
        (Qwen 1.5 MoE).
      groups: choose experts by `ops.experts.route_in_groups`, from so many of so many groups, `(n_chosen, n)`, with
        `b_correction` `(E,)`, 0 at initialisation, which passes no gradient; None for `ops.experts.route`.
      weight_factor: factor of the weights then.
      router_bias: add a bias to the router's logits, `b_router` `(E,)`, 0 at initialisation (GPT-OSS).
      shards: devices on the mesh axis "expert", each of which holds a shard of the experts and sends the others their
        tokens; more than 1 only inside a `jax.shard_map` over that axis.
      renormalize: see `ops.experts.route`.
    """

    make_expert: Make
    n_experts: int
    per_token: int
    capacity_factor: float | None = None
    shared_expert: bool = False
    shards: int = 1
    renormalize: bool | None = None
    make_shared: Make | None = None
    shared_gate: bool = False
    groups: tuple[int, int] | None = None
    weight_factor: float = 1.0
    router_bias: bool = False

    @nn.compact
    def __call__(self, x_TD: jax.Array, valid_T: jax.Array | None = None) -> jax.Array:
        """Map `(T, D)` to `(T, d_out)`; `valid_T` is False for padding, None without."""
        T, D = x_TD.shape
        W_DE = parameter(self, "W_router", uniform_fan_in(D), (D, self.n_experts), "embed -> choices")
        # In float32, because rounding may change a token's experts (Fedus et al. 2022, section 2.4).
        logits_TE = upcast(x_TD) @ upcast(W_DE)
        if self.router_bias:
            b_E = parameter(self, "b_router", nn.initializers.zeros, (self.n_experts,), "choices")
            logits_TE += upcast(b_E)[None]
        if self.groups is None:
            experts_TJ, weights_TJ = route(logits_TE, self.per_token, self.renormalize)
        else:
            correction_E = upcast(parameter(self, "b_correction", nn.initializers.zeros, (self.n_experts,), "choices"))
            renormalize = self.per_token > 1 if self.renormalize is None else self.renormalize
            n_chosen, n_groups = self.groups
            experts_TJ, weights_TJ = route_in_groups(
                logits_TE, self.per_token, correction_E, n_groups, n_chosen, renormalize, self.weight_factor
            )
        share = self.n_experts, self.per_token, self.capacity_factor if self.has_rng("dropout") else None
        room = capacity(T, *share)
        limit = None if valid_T is None else capacity_without_padding(valid_T, *share)
        slots_TJ = assign(experts_TJ, self.n_experts, room, valid_T, limit)
        if not self.is_initializing():
            statistics = router_statistics(logits_TE, experts_TJ, slots_TJ, room, valid_T)
            self.sow(ROUTER, "statistics", statistics, reduce_fn=lambda _, new: new, init_fn=lambda: None)
        with handled_by(None):  # values under `vmap` cannot be captured
            y_ECD = self._through_experts(dispatch(x_TD, slots_TJ, self.n_experts, room))
        y_TD = combine(capture_point(self, "experts", y_ECD), slots_TJ, weights_TJ)
        if self.shared_expert:
            shared_TD = (self.make_shared or self.make_expert)(name="shared")(x_TD)
            if self.shared_gate:
                W_D1 = parameter(self, "W_shared_gate", uniform_fan_in(D), (D, 1), "embed -> choices")
                shared_TD = jax.nn.sigmoid(x_TD @ W_D1) * shared_TD
            y_TD = y_TD + shared_TD
        return capture_point(self, OUTPUT, y_TD)

    def _through_experts(self, x_ECD: jax.Array) -> jax.Array:
        """Apply each expert, including those on other devices, to its slots, `(E, C, D)`."""
        each = nn.vmap(lambda expert, x_CD: expert(x_CD), variable_axes={"params": 0}, split_rngs={"params": True})
        experts = self.make_expert(name="experts")  # the name of its parameters' first axis
        if self.shards == 1:
            return each(experts, x_ECD)
        # The experts of this device receive the slots of all devices.
        x_ECD = jax.lax.all_to_all(x_ECD, AXIS, split_axis=0, concat_axis=1, tiled=True)
        return jax.lax.all_to_all(each(experts, x_ECD), AXIS, split_axis=1, concat_axis=0, tiled=True)


def routers(sown: Mapping[str, Any]) -> dict[str, RouterStatistics]:
    """Return the statistics sown into `ROUTER`, by dotted layer name, such as 'blocks_0.mlp'; for a batch, those of
    each example."""
    is_leaf = lambda x: isinstance(x, RouterStatistics)  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(sown, is_leaf=is_leaf)
    return {".".join(key.key for key in path[:-1]): statistics for path, statistics in leaves}
