"""Multi-head latent attention: keys and values of all heads are made from one compressed row per position (kernels/mla.py).

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1, with the matrices that expand a latent applied to queries and outputs instead.
"""

from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError
from ..kernels.mla import head_group
from ..recorder import LANES, Recorder, padded, padded_vector, wants
from ..rope import RopeConfig
from ..weights import Norm
from .base import AttentionState, Block, NormConfig, TensorSpec
from .site import Site


@dataclass(frozen=True, slots=True)
class LatentAttention(Block):
    """out = o_proj(v_b_proj(softmax(q . rows * scale) @ latents)); a row is [kv_lora_rank latent | rotary columns].

    q_lora_rank        columns of the query's own latent, which is normed; None: one q_proj
    qk_nope_head_dim   columns of a head's query that k_b_proj carries into latent columns
    qk_rope_head_dim   columns that turn; with rope None they are there but do not
    eps                epsilon of the latents' norms

    Raises ConfigError for numbers that do not fit the kernels.
    """

    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float
    rope: RopeConfig | None
    q_lora_rank: int | None = None
    eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: expected at least 1")
        for name in ("kv_lora_rank", "v_head_dim"):
            if getattr(self, name) % LANES or getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is not supported, only multiples of {LANES}")
        if self.qk_rope_head_dim % 2:
            raise ConfigError(f"qk_rope_head_dim={self.qk_rope_head_dim} is odd; the rotary embedding turns pairs")

    @property
    def q_head(self) -> int:
        """Columns of a head's query as projected."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def row(self) -> int:
        """Columns of a row of the cache."""
        return self.kv_lora_rank + padded(self.qk_rope_head_dim)

    def tensors(self, hidden_size: int) -> dict[str, TensorSpec]:
        heads, latent, q_rank = self.num_attention_heads, self.kv_lora_rank, self.q_lora_rank
        shapes: dict[str, tuple[int, ...]] = {"q_proj": (heads * self.q_head, hidden_size)}
        if q_rank is not None:
            shapes = {"q_a_proj": (q_rank, hidden_size), "q_a_layernorm": (q_rank,), "q_b_proj": (heads * self.q_head, q_rank)}
        shapes |= {
            "kv_a_proj_with_mqa": (latent + self.qk_rope_head_dim, hidden_size),
            "kv_a_layernorm": (latent,),
            "k_b_proj": (heads * latent, self.qk_nope_head_dim),
            "v_b_proj": (heads * self.v_head_dim, latent),
            "o_proj": (hidden_size, heads * self.v_head_dim),
        }
        return {name: TensorSpec(f"self_attn.{name}.weight", shape) for name, shape in shapes.items()}

    def rows(self, hidden_size: int) -> dict[str, int]:
        heads = self.num_attention_heads
        rows = {"q": heads * self.q_head, "kv": self.kv_lora_rank + self.qk_rope_head_dim, "query": heads * self.row}
        return rows | {"attended": heads * self.v_head_dim} | ({} if self.q_lora_rank is None else {"q_a": self.q_lora_rank})

    def state(self) -> AttentionState:
        return AttentionState(kv_heads=1, k_dim=self.row, v_dim=0)

    def ropes(self) -> tuple[tuple[RopeConfig, int], ...]:
        return () if self.rope is None else ((self.rope, self.qk_rope_head_dim),)

    def scratch_bytes(self, hidden_size: int, context_length: int) -> int:
        scores = LANES * (_scores_row_bytes(context_length) + 64)
        return max(Block.scratch_bytes(self, hidden_size, context_length), scores, 4 * self.row + 256)

    def record(self, r: Recorder, site: Site) -> None:
        q, query, attended, o_proj = site.rows("q"), site.rows("query"), site.rows("attended"), site.matrix("o_proj")
        heads, latent, row = self.num_attention_heads, self.kv_lora_rank, self.row
        self._record_projections(r, site)
        self._record_rotary(r, site)
        r.head_product("k_b", site.matrix("k_b_proj"), heads, q, self.q_head, query, row)
        r.latent_attention(
            site.start, query, heads, latent, row, site.state, site.kv_dtype, self.scale, _scores_row_bytes(site.context_length),
            head_group(r.kernels.isa, heads),
        )  # fmt: skip
        r.head_product("v_b", site.matrix("v_b_proj"), heads, query, row, attended, self.v_head_dim)
        r.product("o", o_proj, r.activation("quantize", attended, wants([o_proj])), site.out, onto=site.onto)

    def _record_projections(self, r: Recorder, site: Site) -> None:
        """The heads' queries, and the row of each token as projected."""
        first, q_b = ("q_proj", None) if self.q_lora_rank is None else ("q_a_proj", site.matrix("q_b_proj"))
        q_proj, kv_proj = site.matrix(first), site.matrix("kv_a_proj_with_mqa")
        x = site.input(r, wants([q_proj, kv_proj]))
        r.product("q", q_proj, x, site.rows("q" if q_b is None else "q_a"), barrier=False)
        r.product("kv", kv_proj, x, site.rows("kv"))
        if q_b is not None:
            norm = Norm(NormConfig(self.eps), _vector(site, "q_a_layernorm"))
            r.product("q_b", q_b, r.activation("q_a norm", site.rows("q_a"), wants([q_b]), norm), site.rows("q"))

    def _record_rotary(self, r: Recorder, site: Site) -> None:
        table = None if self.rope is None else site.rope_table(self.rope, self.qk_rope_head_dim)
        weight = padded_vector(_vector(site, "kv_a_layernorm"))
        r.latent_append(site.start, site.rows("kv"), self.kv_lora_rank, weight, self.eps, table, site.state, site.kv_dtype)
        q, query = site.rows("q"), site.rows("query")
        r.latent_query(site.start, q, self.num_attention_heads, self.qk_nope_head_dim, table, query, self.kv_lora_rank)


def _vector(site: Site, name: str) -> np.ndarray:
    found = site.vector(name)
    assert found is not None
    return found


def _scores_row_bytes(context_length: int) -> int:
    return padded(context_length) * 4 + 64
