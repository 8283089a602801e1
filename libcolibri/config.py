"""What a decoder computes, as data: layers composed of blocks, frozen and checked once.

In: blocks that a family file (models/) has read from a config. Out: `ModelConfig`, which converter, loader and decoder take as true.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from .blocks.base import Block, ExpertShape, NormConfig, RecurrentState, State, TensorSpec
from .errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sublayer:
    """x += residual_multiplier * output_norm(block(input_norm(x))); norms by their tensors' names below the layer, None for none."""

    block: Block
    input_norm: str | None = None
    output_norm: str | None = None


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """A decoder layer: its sublayers in order; `scalar` names a learned factor of the residual stream after them."""

    sublayers: tuple[Sublayer, ...]
    scalar: str | None = None


def standard_layer(mixer: Block, ffn: Block) -> LayerConfig:
    """The layer of most families: each block behind a norm of its own."""
    return LayerConfig((Sublayer(mixer, "input_layernorm"), Sublayer(ffn, "post_attention_layernorm")))


def sandwich_layer(mixer: Block, ffn: Block) -> LayerConfig:
    """Gemma's layer: a norm before and a norm after each block."""
    return LayerConfig(
        (
            Sublayer(mixer, "input_layernorm", "post_attention_layernorm"),
            Sublayer(ffn, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        )
    )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only language model.

    norm                       of the residual stream, also before lm_head
    max_context_length         longest context that the positions allow, in tokens
    embedding_multiplier       embeddings are multiplied by it
    residual_multiplier        each block's output is multiplied by it before it is added
    logits_multiplier          logits are multiplied by it; then, with logit_softcap c, they become c * tanh(logits / c)
    tie_word_embeddings        lm_head is the embedding matrix
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm: NormConfig
    max_context_length: int
    tie_word_embeddings: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    logit_softcap: float | None = None
    lm_head_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "max_context_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: expected at least 1")
        if not self.layers:
            raise ConfigError("num_hidden_layers=0: expected at least 1")
        if not self.norm.eps >= 0.0:
            raise ConfigError(f"rms_norm_eps={self.norm.eps}: expected a number from 0 up")
        if self.norm.kind not in ("rms", "layer"):
            raise ConfigError(f"norm kind {self.norm.kind!r} is not supported, only 'rms' or 'layer'")
        if self.logit_softcap is not None and not self.logit_softcap > 0.0:
            raise ConfigError(f"logit softcap {self.logit_softcap}: expected null or a number above 0")

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The different blocks of the model, in the order of their first layer."""
        return tuple(dict.fromkeys(sub.block for layer in self.layers for sub in layer.sublayers))

    @property
    def states(self) -> tuple[State | None, ...]:
        """What a session keeps, layer by layer. A layer has one block with state at most."""
        return tuple(
            next((state for sub in layer.sublayers if (state := sub.block.state()) is not None), None) for layer in self.layers
        )

    @property
    def is_recurrent(self) -> bool:
        """Whether some layer's state cannot be cut back to an earlier position."""
        return any(isinstance(state, RecurrentState) for state in self.states)

    @property
    def experts(self) -> dict[int, ExpertShape]:
        """Routed experts by layer; empty in a dense model."""
        found = [(i, sub.block.experts(self.hidden_size)) for i, layer in enumerate(self.layers) for sub in layer.sublayers]
        return {i: shape for i, shape in found if shape is not None}

    @property
    def is_moe(self) -> bool:
        return bool(self.experts)

    @property
    def num_experts_per_tok(self) -> int:
        """Most experts that a token uses in a layer; 0 in a dense model."""
        return max((shape.num_experts_per_tok for shape in self.experts.values()), default=0)

    def vectors_of_norm(self, name: str) -> dict[str, TensorSpec]:
        """Field -> tensor of the norm called `name`."""
        specs = {"weight": TensorSpec(f"{name}.weight", (self.hidden_size,))}
        if self.norm.kind == "layer":
            specs["bias"] = TensorSpec(f"{name}.bias", (self.hidden_size,))
        return specs

    def layer_tensors(self, layer: int) -> Iterator[TensorSpec]:
        """Every tensor of a layer but its routed experts; names below the layer."""
        config = self.layers[layer]
        for sub in config.sublayers:
            for norm in (sub.input_norm, sub.output_norm):
                if norm is not None:
                    yield from self.vectors_of_norm(norm).values()
            yield from sub.block.tensors(self.hidden_size).values()
        if config.scalar is not None:
            yield TensorSpec(config.scalar, (1,))

    def tensors(self) -> dict[str, TensorSpec]:
        """Every tensor of the model by its full canonical name, in the order in which they are stored."""
        specs = {"model.embed_tokens.weight": TensorSpec("model.embed_tokens.weight", (self.vocab_size, self.hidden_size))}
        experts = self.experts
        for i in range(self.num_hidden_layers):
            prefix = f"model.layers.{i}."
            specs |= {prefix + spec.name: spec for spec in self.layer_tensors(i)}
            if i in experts:
                for e in range(experts[i].num_experts):
                    for part, shape in experts[i].parts:
                        specs[f"{prefix}mlp.experts.{e}.{part}.weight"] = TensorSpec(f"mlp.experts.{e}.{part}.weight", shape)
        specs |= {f"model.{spec.name}": spec for spec in self.vectors_of_norm("norm").values()}
        if not self.tie_word_embeddings:
            specs["lm_head.weight"] = TensorSpec("lm_head.weight", (self.vocab_size, self.hidden_size))
        if self.lm_head_bias:
            specs["lm_head.bias"] = TensorSpec("lm_head.bias", (self.vocab_size,))
        return specs
