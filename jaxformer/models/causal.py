"""Base of the config of the decoder: its causal self-attention, with grouped heads, windows and rotary positions."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Annotated, Any

from jaxformer.config.fields import Depth, Length, NonNegative, PositiveFloat, Range, Size
from jaxformer.contract import AttentionShape
from jaxformer.errors import UserError
from jaxformer.models.blocks import TokenBlocksConfig, check_local_heads
from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.nn.block import Make
from jaxformer.nn.execution import Execution
from jaxformer.nn.local_heads import LocalHeads
from jaxformer.nn.norms import epsilon
from jaxformer.ops.masks import Causal
from jaxformer.ops.positions import Llama3Scaling, RoPE


@dataclass(frozen=True)
class CausalAttentionConfig(TokenBlocksConfig):
    """Shape of blocks with causal self-attention."""

    n_blocks: Depth = 1
    """Number of blocks."""
    n_kv_heads: Size | None = None
    """Key/value heads, shared by the query heads; by default, n_heads."""
    output_bias: bool | None = None
    """Bias of W_O; by default, as attention_bias."""
    local_heads: NonNegative = 0
    """Heads of each block that attend to a fixed distance at initialisation: the first one position back, the second
    two back, and so on. Needs RoPE and attention_bias, whose b_Q and b_K are initialised accordingly."""
    score_scale: PositiveFloat | None = None
    """Factor applied to the attention scores; by default, 1/sqrt(head_dim)."""
    qk_norm: bool = False
    """RMS-normalise queries and keys."""
    window: Length | None = None
    """Positions that a query attends to, counting back from and including itself; by default, all."""
    global_blocks: tuple[int, ...] = ()
    """Indices, from 0, of the blocks without an attention window."""
    max_context: Length | None = None
    """Longest sequence, in tokens, over which attention is full, and the number of learned positions if there are any;
    by default context_length, which sets the length of training sequences."""
    local_rope_base: Annotated[float, Range(least=1)] | None = None
    """Base of RoPE, without scaling, in the blocks with a window; by default, rope_base with the scaling."""
    rope_scaling: Annotated[float, Range(least=1)] = 1.0
    """Divisor of positions in RoPE; above 1 for sequences longer than the training context."""
    rope_original_context: Length | None = None
    """Training context in tokens of a model whose RoPE is scaled by frequency (Llama 3.1): rope_scaling then divides
    only frequencies with few periods in it. By default, rope_scaling divides all."""
    rope_periods: tuple[float, ...] = (1.0, 4.0)
    """Periods per rope_original_context below which a frequency is divided, and above which it is not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_local_heads(self)
        if self.n_heads % self.kv_heads:
            reason = "every key/value head serves equally many query heads"
            raise UserError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.kv_heads}; {reason}.")
        if self.max_context is not None and self.max_context < self.context_length:
            problem = f"max_context is {self.max_context}, but context_length is {self.context_length}"
            raise UserError(f"{problem}; set it to at least that, or omit it.")
        if len(self.rope_periods) != 2 or not self.rope_periods[0] < self.rope_periods[1]:
            raise UserError(f"rope_periods is {self.rope_periods}; it must be a number and a larger one.")
        for name in ("global_blocks", "local_rope_base"):
            if getattr(self, name) and self.window is None:
                remedy = "set window, or omit it"
                raise UserError(f"{name} is {getattr(self, name)}, but without a window no block is local; {remedy}.")
        if any(not 0 <= i < self.n_blocks for i in self.global_blocks):
            limit = f"the indices of {self.n_blocks} blocks are 0 to {self.n_blocks - 1}"
            raise UserError(f"global_blocks is {self.global_blocks}; {limit}.")

    @property
    def kv_heads(self) -> int:
        """Number G of key/value heads."""
        return self.n_kv_heads or self.n_heads

    @property
    def width_of_values(self) -> int:
        """Width of a head's values and output."""
        return self.width_of_head

    @property
    def scale(self) -> float:
        """Factor applied to the attention scores."""
        return self.width_of_head**-0.5 if self.score_scale is None else self.score_scale

    @property
    def attention_std(self) -> float:
        """Standard deviation of the attention projections at initialisation."""
        return 1 / sqrt(self.d_model)

    @property
    def attention_gain(self) -> float:
        """Mean square of attention's output at initialisation, divided by that of the heads' outputs."""
        return self.n_heads * self.width_of_values * self.attention_std**2

    @property
    def n_positions(self) -> int:
        """Length in tokens of the longest sequence with full attention."""
        return self.max_context or self.context_length

    @property
    def attention_window(self) -> int:
        """Maximum number of positions that a query attends to, itself included: the window or, without one,
        `n_positions`, even in a longer sequence."""
        return max(self.block_windows)

    @property
    def block_windows(self) -> tuple[int, ...]:
        """Attention window of each block."""
        local = self.window or self.n_positions
        return tuple(self.n_positions if i in self.global_blocks else local for i in range(self.n_blocks))

    @property
    def block_groups(self) -> tuple[tuple[int, slice], ...]:
        """Window and slice of each group of consecutive blocks with the same kind of attention; each group is one
        scan."""
        kinds = [(window, i in self.global_blocks) for i, window in enumerate(self.block_windows)]
        ends = [i for i in range(1, len(kinds) + 1) if i == len(kinds) or kinds[i] != kinds[i - 1]]
        return tuple((kinds[end - 1][0], slice(first, end)) for first, end in zip([0, *ends], ends, strict=False))

    def rope(self, block: int) -> RoPE | None:
        """Return the rotation of a block's queries and keys; None without RoPE."""
        if self.positions != "rope":
            return None
        if self.local_rope_base is not None and block not in self.global_blocks:
            return RoPE(self.local_rope_base)
        if self.rope_original_context is None:
            return RoPE(self.rope_base, self.rope_scaling)
        low, high = self.rope_periods
        return RoPE(self.rope_base, Llama3Scaling(self.rope_scaling, low, high, self.rope_original_context))

    def attention_shape(self, n_positions: int, mask: Causal | str | None = None) -> AttentionShape:
        widths = self.width_of_head, self.width_of_values
        return AttentionShape(self.n_heads, self.kv_heads, *widths, n_positions, mask)

    def make_attention(
        self, execution: Execution, heads: type[MultiHeadAttention] = LocalHeads, **options: Any
    ) -> Make:
        attributes = {
            "n_kv_heads": self.kv_heads,
            "output_bias": self.output_bias,
            "scale": self.score_scale,
            "qk_norm": self.qk_norm,
            "norm_eps": epsilon("rmsnorm", self.norm_eps),
            "distances": tuple(range(1, self.local_heads + 1)),
        }
        return super().make_attention(execution, heads, **attributes | options)
