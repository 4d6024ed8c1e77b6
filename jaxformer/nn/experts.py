"""A mixture of experts with its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax

from jaxformer.nn.block import Make
from jaxformer.nn.execution import ROUTER
from jaxformer.nn.mlp import uniform_fan_in
from jaxformer.nn.parameters import parameter, stacked
from jaxformer.ops.experts import (
    RouterStatistics,
    assign,
    capacity,
    combine,
    dispatch,
    route,
    router_statistics,
)
from jaxformer.ops.precision import widened

AXIS = "expert"
"""Of the mesh: the one that splits experts."""


class Experts(nn.Module):
    """Several MLPs, of which each token goes through a few: `(T, D)` to `(T, d_out)` (Shazeer et al. 2017).

    `W_router` `(D, E)` chooses. The parameters of `experts` have an axis more than those of one, the first, `(E, …)`.

    Tokens that find no room are dropped in training alone, which is told as for dropout by an rng named "dropout": so
    a model that is measured or sampled from gives a token the same, whatever stands beside it. `RouterStatistics`
    are sown as "statistics" into the collection `ROUTER`, if that is mutable.

    Attributes:
      make_expert: maker of one.
      n_experts, per_token: how many there are, and how many a token goes through.
      capacity_factor: see `ops.experts.capacity`.
      shared_expert: add one more, `shared`, that all tokens go through (Dai et al. 2024, section 3.2).
      shards: devices on the mesh's axis "expert", of which each has its part of the experts and sends the others their
        tokens; more than 1 only within a `jax.shard_map` over that axis.
    """

    make_expert: Make
    n_experts: int
    per_token: int
    capacity_factor: float | None = None
    shared_expert: bool = False
    shards: int = 1

    @nn.compact
    def __call__(self, x_TD: jax.Array) -> jax.Array:
        T, D = x_TD.shape
        W_DE = parameter(self, "W_router", uniform_fan_in(D), (D, self.n_experts), "embed -> choices")
        # In float32, as rounding may send a token elsewhere (Fedus et al. 2022, section 2.4).
        logits_TE = widened(x_TD) @ widened(W_DE)
        experts_TJ, weights_TJ = route(logits_TE, self.per_token)
        room = capacity(T, self.n_experts, self.per_token, self.capacity_factor if self.has_rng("dropout") else None)
        slots_TJ = assign(experts_TJ, self.n_experts, room)
        if not self.is_initializing():
            statistics = router_statistics(logits_TE, experts_TJ, slots_TJ, room)
            self.sow(ROUTER, "statistics", statistics, reduce_fn=lambda _, new: new, init_fn=lambda: None)
        y_ECD = self._through_experts(dispatch(x_TD, slots_TJ, self.n_experts, room))
        y_TD = combine(y_ECD, slots_TJ, weights_TJ)
        return y_TD + self.make_expert(name="shared")(x_TD) if self.shared_expert else y_TD

    def _through_experts(self, x_ECD: jax.Array) -> jax.Array:
        """Each expert's MLP on its own tokens, wherever it lies."""
        each = nn.vmap(lambda expert, x_CD: expert(x_CD), variable_axes={"params": 0}, split_rngs={"params": True})
        experts = self.make_expert(name="experts")
        if self.shards == 1:
            with stacked("experts"):
                return each(experts, x_ECD)
        # To the experts here come the tokens of all devices, in places beside each other.
        x_ECD = jax.lax.all_to_all(x_ECD, AXIS, split_axis=0, concat_axis=1, tiled=True)
        return jax.lax.all_to_all(each(experts, x_ECD), AXIS, split_axis=1, concat_axis=0, tiled=True)


def routers(sown: Mapping[str, Any]) -> dict[str, RouterStatistics]:
    """What was sown into `ROUTER`, by the dotted name of the layer that did, such as 'blocks_0.mlp'."""
    is_leaf = lambda x: isinstance(x, RouterStatistics)  # noqa: E731
    found = jax.tree_util.tree_leaves_with_path(sown, is_leaf=is_leaf)
    return {".".join(key.key for key in path[:-1]): statistics for path, statistics in found}
