"""Config keys that several families share: sizes, rotary embedding, sliding windows, token ids.

In: a `ConfigReader`. Out: arguments for blocks and `ModelConfig`.
"""

from collections.abc import Callable, Iterable
from typing import Any

from ..blocks.attention import Attention
from ..blocks.base import Block, NormConfig
from ..blocks.mlp import Mlp
from ..blocks.moe import MoE
from ..blocks.router import Router
from ..config import LayerConfig, ModelConfig, standard_layer
from ..errors import ConfigError
from ..rope import RopeConfig
from .config_reader import ConfigReader
from .family import Rule
from .rope_config import read_rope

SHARED_EXPERTS = Rule(r"(.*\.mlp)\.(?:shared_experts|shared_mlp)\.(.*)", r"\1.shared_expert.\2")
# Mixtral's names, which other families took over.
BLOCK_SPARSE_MOE = (
    Rule(r"(.*)\.block_sparse_moe\.experts\.(\d+)\.w1\.weight", r"\1.mlp.experts.\2.gate_proj.weight"),
    Rule(r"(.*)\.block_sparse_moe\.experts\.(\d+)\.w2\.weight", r"\1.mlp.experts.\2.down_proj.weight"),
    Rule(r"(.*)\.block_sparse_moe\.experts\.(\d+)\.w3\.weight", r"\1.mlp.experts.\2.up_proj.weight"),
    Rule(r"(.*)\.block_sparse_moe\.gate\.weight", r"\1.mlp.gate.weight"),
)
GRANITE_MOE = (
    Rule(r"(.*)\.block_sparse_moe\.input_linear\.weight", r"\1.mlp.experts.{}.gate_proj.weight \1.mlp.experts.{}.up_proj.weight", "halves"),
    Rule(r"(.*)\.block_sparse_moe\.output_linear\.weight", r"\1.mlp.experts.{}.down_proj.weight"),
    Rule(r"(.*)\.block_sparse_moe\.router\.layer\.weight", r"\1.mlp.gate.weight"),
    Rule(
        r"(.*)\.shared_mlp\.input_linear\.weight",
        r"\1.mlp.shared_expert.gate_proj.weight \1.mlp.shared_expert.up_proj.weight",
        "halves",
    ),
    Rule(r"(.*)\.shared_mlp\.output_linear\.weight", r"\1.mlp.shared_expert.down_proj.weight"),
)


def half_split(heads: int, head_dim: int, turning: int) -> list[int]:
    """Order of a projection's rows that makes pairs (2j, 2j + 1) of a head's first `turning` columns pairs (j, j + turning / 2)."""
    inner = [*range(0, turning, 2), *range(1, turning, 2), *range(turning, head_dim)]
    return [head * head_dim + i for head in range(heads) for i in inner]


def _half_split_q(layer: LayerConfig) -> list[int]:
    block = _attention(layer)
    return half_split(block.num_attention_heads, block.head_dim, _turning(block))


def _half_split_k(layer: LayerConfig) -> list[int]:
    block = _attention(layer)
    return half_split(block.num_key_value_heads, block.head_dim, _turning(block))


def _attention(layer: LayerConfig) -> Attention:
    return next(sub.block for sub in layer.sublayers if isinstance(sub.block, Attention))


def _turning(block: Attention) -> int:
    return 0 if block.rope is None else block.rope.columns(block.head_dim)


# Families that turn neighbouring columns together; kernels turn pairs that are half a head apart.
INTERLEAVED_ROPE = (
    Rule(r"(.*\.self_attn\.q_proj\.(?:weight|bias))", r"\1", order=_half_split_q),
    Rule(r"(.*\.self_attn\.k_proj\.(?:weight|bias))", r"\1", order=_half_split_k),
)


def _whole_q(layer: LayerConfig) -> list[int]:
    block = _attention(layer)
    return half_split(block.num_attention_heads, block.head_dim, block.head_dim)


def _whole_k(layer: LayerConfig) -> list[int]:
    block = _attention(layer)
    return half_split(block.num_key_value_heads, block.head_dim, block.head_dim)


# The same in llama.cpp's files, which keep such rows as they are ...
GGUF_INTERLEAVED = (
    Rule(r"(.*)\.attn_q\.(weight|bias)", r"\1.self_attn.q_proj.\2", order=_half_split_q),
    Rule(r"(.*)\.attn_k\.(weight|bias)", r"\1.self_attn.k_proj.\2", order=_half_split_k),
)
# ... and interleave those of Llama and its relatives, whole heads in every layer.
GGUF_LLAMA = (
    Rule(r"(.*)\.attn_q\.(weight|bias)", r"\1.self_attn.q_proj.\2", order=_whole_q),
    Rule(r"(.*)\.attn_k\.(weight|bias)", r"\1.self_attn.k_proj.\2", order=_whole_k),
)


def ignore(reader: ConfigReader, *keys: str) -> None:
    """Keys of released configs that change nothing in this family's forward pass."""
    for key in keys:
        reader.value(key, None)


def num_layers(reader: ConfigReader) -> int:
    return int(reader.integer("num_hidden_layers"))


def build(reader: ConfigReader, layers: Iterable[LayerConfig], *, eps: float = 1e-6, tied: bool = False, **fields: Any) -> ModelConfig:
    """The config of these layers, once nothing in the source is left unread.

    eps, tied   the family's defaults for rms_norm_eps and tie_word_embeddings
    fields      other fields of ModelConfig
    """
    layers = tuple(layers)
    max_positions, bos = reader.integer("max_position_embeddings"), reader.token_ids("bos_token_id")
    ropes = {rope for layer in layers for sub in layer.sublayers for rope, _ in sub.block.ropes()}
    stretched = [int((rope.original_max_position_embeddings or 0) * rope.factor) for rope in ropes]
    config = {
        "family": reader.family,
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": reader.integer("hidden_size"),
        "layers": layers,
        "norm": NormConfig(norm_eps(reader, eps)),
        "max_context_length": max(max_positions, *stretched, 0),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", tied),
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": reader.token_ids("eos_token_id"),
    }
    reader.finish()
    return ModelConfig(**(config | fields))


def norm_eps(reader: ConfigReader, default: float = 1e-6) -> float:
    return float(reader.number("rms_norm_eps", default))


def attention_fields(
    reader: ConfigReader, *, eps: float = 1e-6, head_dim: int | None = None, theta: float = 10000.0, partial: float | None = None
) -> dict[str, Any]:
    """Arguments of `Attention` that mean the same in every family with one rotary embedding.

    eps, head_dim, theta, partial   the family's defaults; without `partial`, the share of columns that turn, all do
    """
    rope = read_rope(reader, reader.integer("max_position_embeddings"), theta, partial=partial)
    return {**head_fields(reader, eps=eps, head_dim=head_dim), "rope": rope}


def head_fields(reader: ConfigReader, *, eps: float = 1e-6, head_dim: int | None = None) -> dict[str, Any]:
    """`attention_fields` without the rotary embedding, which some families have for each layer type."""
    hidden_size, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    dim = reader.integer("head_dim", head_dim) if reader.has("head_dim") or head_dim else _derived_head_dim(reader, hidden_size, heads)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": _key_value_heads(reader, heads),
        "head_dim": dim,
        "eps": norm_eps(reader, eps),
    }


def ropes_by_layer(reader: ConfigReader, rope: RopeConfig) -> list[RopeConfig | None]:
    """`rope`, or None in the layers that `no_rope_layers` marks 0; by default every `no_rope_layer_interval`-th has none."""
    count, interval = num_layers(reader), reader.integer("no_rope_layer_interval", 4)
    flags = reader.value("no_rope_layers", None) or [int((i + 1) % interval != 0) for i in range(count)]
    if not isinstance(flags, list) or len(flags) != count or any(flag not in (0, 1) for flag in flags):
        raise reader.refusal("no_rope_layers", flags, f"{count} entries, each 0 or 1")
    return [rope if flag else None for flag in flags]


def mlp(reader: ConfigReader, key: str = "intermediate_size", prefix: str = "mlp.", *, bias: bool = False) -> Mlp:
    """The dense block with silu."""
    reader.only("hidden_act", "silu", "swish")
    return Mlp(reader.integer(key), prefix, bias=bias)


def gelu_mlp(reader: ConfigReader, width: int | None = None) -> Mlp:
    """The dense block of the Gemma families; `width` in place of intermediate_size."""
    reader.only(reader.either("hidden_act", "hidden_activation"), "gelu_pytorch_tanh")
    return Mlp(width or reader.integer("intermediate_size"), activation="gelu_tanh")


def attentions(windows: Iterable[int | None], **fields: Any) -> list[Attention]:
    """One block per layer, equal but for the window."""
    return [Attention(**fields, window=window) for window in windows]


def _derived_head_dim(reader: ConfigReader, hidden_size: int, heads: int) -> int:
    reader.value("head_dim", None)
    if hidden_size % heads:
        raise ConfigError(
            f"{reader.family} config: hidden_size={hidden_size} is no multiple of num_attention_heads={heads} and head_dim is not given"
        )
    return hidden_size // heads


def _key_value_heads(reader: ConfigReader, heads: int) -> int:
    # These mean "as many as query heads" when the key is absent; the others' class defaults (8, 32, 16, 4) fit one size each: refuse.
    if reader.family in ("llama", "olmo2", "olmoe", "phi3", "smollm3") or "num_key_value_heads" in reader.raw:
        return reader.integer("num_key_value_heads", None) or heads
    return reader.integer("num_key_value_heads")


def every_layer_window(reader: ConfigReader, *, default: int | None) -> list[int | None]:
    """Mistral's rule: `sliding_window` holds in every layer, null means none."""
    window = reader.integer("sliding_window", default) if reader.raw.get("sliding_window", default) is not None else None
    reader.value("sliding_window", None)
    _refuse_layer_types(reader, "sliding_attention" if window else "full_attention")
    return [window] * num_layers(reader)


def no_window(reader: ConfigReader) -> list[int | None]:
    """A family without sliding windows."""
    reader.only("sliding_window", None)
    _refuse_layer_types(reader, "full_attention")
    return [None] * num_layers(reader)


def _refuse_layer_types(reader: ConfigReader, only: str) -> None:
    types = reader.value("layer_types", None)
    if types is not None and types != [only] * num_layers(reader):
        raise reader.refusal("layer_types", types, f"{num_layers(reader)} times {only!r} in this family")


def qwen_window(reader: ConfigReader, *, rule: str) -> list[int | None]:
    """Qwen's rule: `sliding_window` counts only with `use_sliding_window`, in the layers that `layer_types` or `rule` names.

    rule   "late": layers from max_window_layers up; "even": even layers below it; "all": every layer
    """
    used = reader.flag("use_sliding_window", False)
    window, first = reader.value("sliding_window", 4096), reader.integer("max_window_layers", 28, least=0)
    types, count = reader.value("layer_types", None), num_layers(reader)
    if not used:
        if types is not None and types != ["full_attention"] * count:
            raise reader.refusal("layer_types", types, "only 'full_attention' while use_sliding_window is false")
        return [None] * count
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise reader.refusal("sliding_window", window, "an integer from 1 up while use_sliding_window is true")
    if types is not None and rule != "all":
        return [window if sliding else None for sliding in sliding_flags(reader, types)]
    if types is not None:
        _refuse_layer_types(reader, "sliding_attention")
    rules = {"late": lambda i: i >= first, "even": lambda i: i % 2 == 0 and i < first, "all": lambda i: True}
    return [window if rules[rule](i) else None for i in range(count)]


def layer_windows(reader: ConfigReader, *, default: Callable[[int], bool]) -> list[int | None]:
    """`sliding_window` in the layers that `layer_types`, or in its absence `default`, says are sliding; `sliding_window` null: in none."""
    window = reader.integer("sliding_window", None)
    return [window if slides else None for slides in sliding_layers(reader, default=default)]


def sliding_layers(reader: ConfigReader, *, default: Callable[[int], bool]) -> list[bool]:
    """Which layers slide: `layer_types` says it, or in its absence `default`."""
    types = reader.value("layer_types", None)
    return [default(i) for i in range(num_layers(reader))] if types is None else sliding_flags(reader, types)


def mixed_windows(reader: ConfigReader, *, pattern: int, window: int) -> list[int | None]:
    """`sliding_window` (default `window`) in the layers that `layer_types` names, else in all but every pattern-th one."""
    found = reader.integer("sliding_window", window)
    return [found if slides else None for slides in sliding_layers(reader, default=lambda i: (i + 1) % pattern != 0)]


def sliding_flags(reader: ConfigReader, types: Any) -> list[bool]:
    """Whether each layer slides, from a list of layer types."""
    known = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != num_layers(reader) or any(t not in known for t in types):
        raise reader.refusal("layer_types", types, f"{num_layers(reader)} entries, each 'full_attention' or 'sliding_attention'")
    return [t == "sliding_attention" for t in types]


def standard_layers(mixers: Iterable[Block], routed: Iterable[bool], mlp: Block, moe: Block) -> list[LayerConfig]:
    """Standard layers, with experts where `routed` says so."""
    return [standard_layer(mixer, moe if sparse else mlp) for mixer, sparse in zip(mixers, routed, strict=True)]


def sparse_layers(reader: ConfigReader, *, dense: int) -> list[bool]:
    """Which layers have experts: `mlp_layer_types` says it, or all but the first `first_k_dense_replace` (default `dense`) have."""
    count, types = num_layers(reader), reader.value("mlp_layer_types", None)
    first = reader.integer("first_k_dense_replace", dense, least=0)
    if types is None:
        return [i >= first for i in range(count)]
    if not isinstance(types, list) or len(types) != count or any(t not in ("dense", "sparse") for t in types):
        raise reader.refusal("mlp_layer_types", types, f"{count} entries, each 'dense' or 'sparse'")
    return [t == "sparse" for t in types]


def deepseek_moe(
    reader: ConfigReader, *, num_experts: str = "n_routed_experts", shared: str = "n_shared_experts", width: str = "moe_intermediate_size",
    **router: Any,
) -> MoE:  # fmt: skip
    """DeepSeek-V3's block in its keys: sigmoid scores, a bias for the choice, groups of experts; shared experts are one MLP.

    num_experts, shared, width   the family's keys for the numbers of routed and of shared experts, and for the width of one
    router                       fields of Router that the family has otherwise
    """
    reader.only("hidden_act", "silu", "swish")
    reader.only("scoring_func", "sigmoid")
    reader.only("topk_method", "noaux_tc")
    columns, count = reader.integer(width), reader.integer(shared, None, least=0)
    rule: dict[str, Any] = {
        "score": "sigmoid", "choice_bias": True, "normalise": reader.flag("norm_topk_prob", True), "eps": 1e-20,
        "scale": reader.number("routed_scaling_factor", None) or 1.0, "groups": reader.integer("n_group", None) or 1,
        "kept_groups": reader.integer("topk_group", None) or 1, "group_score": "top2",
    }  # fmt: skip
    return MoE(
        num_experts=reader.integer(reader.either(num_experts, "num_local_experts", "num_experts", "n_routed_experts")),
        num_experts_per_tok=reader.integer("num_experts_per_tok"),
        moe_intermediate_size=columns,
        router=Router(**(rule | router)),
        shared=Mlp(columns * count, "mlp.shared_expert.") if count else None,
    )


def routed_layers(reader: ConfigReader) -> list[bool]:
    """Qwen's keys for which layers have experts."""
    count, num_experts = num_layers(reader), _num_experts(reader)
    step, dense = reader.integer("decoder_sparse_step", 1), reader.value("mlp_only_layers", None) or []
    if not isinstance(dense, list) or any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < count for i in dense):
        raise reader.refusal("mlp_only_layers", dense, f"a list of layers from 0 to {count - 1}")
    return [num_experts > 0 and i not in dense and (i + 1) % step == 0 for i in range(count)]


def _num_experts(reader: ConfigReader) -> int:
    return int(reader.integer(reader.either("num_local_experts", "num_experts"), least=0))


def expert_fields(reader: ConfigReader, *, normalise: bool = False) -> dict[str, Any]:
    """Arguments of `MoE` in Qwen's keys; `normalise` is the family's default for norm_topk_prob."""
    reader.only("hidden_act", "silu", "swish")
    return {
        "num_experts": _num_experts(reader),
        "num_experts_per_tok": reader.integer("num_experts_per_tok"),
        "moe_intermediate_size": reader.integer("moe_intermediate_size"),
        # Qwen's classes default to false, and released models differ: an absent key means false there, never a guess.
        "router": Router(normalise=reader.flag("norm_topk_prob", normalise)),
    }


def hybrid_layer_types(names: Iterable[str]) -> list[str]:
    """Layer types of models with state-space layers, older words replaced by the present ones."""
    return [{"mamba": "linear_attention", "attention": "full_attention"}.get(name, name) for name in names]


def granite_multipliers(reader: ConfigReader) -> dict[str, Any]:
    """Fields of `ModelConfig` in Granite's keys; logits are divided by logits_scaling."""
    multipliers = {name: reader.number(name, None) or 1.0 for name in ("embedding_multiplier", "residual_multiplier")}
    return multipliers | {"logits_multiplier": 1.0 / (reader.number("logits_scaling", None) or 1.0)}


def granite_attentions(reader: ConfigReader) -> list[Attention]:
    """Granite's attention, whose scores are multiplied by attention_multiplier."""
    bias, scale = reader.flag("attention_bias", False), reader.number("attention_multiplier", None) or 1.0
    return attentions(no_window(reader), **attention_fields(reader), bias=bias, out_bias=bias, scale=scale)


def granite_moe(reader: ConfigReader, shared: Mlp | None) -> ModelConfig:
    """Granite with experts in every layer."""
    moe = granite_experts(reader, shared)
    return build(reader, [standard_layer(a, moe) for a in granite_attentions(reader)], **granite_multipliers(reader))


def granite_experts(reader: ConfigReader, shared: Mlp | None) -> MoE:
    """Experts weighed by a softmax over the chosen ones; intermediate_size is the width of one."""
    reader.only("hidden_act", "silu", "swish")
    return MoE(
        num_experts=_num_experts(reader),
        num_experts_per_tok=reader.integer("num_experts_per_tok", 2),
        moe_intermediate_size=reader.integer("intermediate_size"),
        router=Router(score="chosen_softmax"),
        shared=shared,
    )
