"""A recipe and overrides of its single fields as command line arguments, for every command that takes one."""

import dataclasses
import inspect
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_type_hints

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from cad_jax.config import RunConfig
from cad_jax.model_config import LlamaConfig, RopeScaling
from cad_jax.recipes import RECIPES


@dataclass(frozen=True)
class RopeScalingOptions:
    """Frequency scaling of Llama 3.1, off until a factor is given."""

    factor: float | None = None
    """Stretches wavelengths beyond the original context by so much (8 in Llama 3.1); None for no
    scaling."""
    low_freq_factor: float = RopeScaling.low_freq_factor
    """Wavelengths beyond the original context over this are stretched in full."""
    high_freq_factor: float = RopeScaling.high_freq_factor
    """Wavelengths below the original context over this are kept."""
    original_context_tokens: int = RopeScaling.original_context_tokens
    """Context length of pretraining."""


MODEL_HELP = {
    "vocab_size": "Tokens of the tokenizer's vocabulary; the recipe's tokenizer must have as many.",
    "embedding_dim": "E: width of a token between layers.",
    "num_layers": "L: transformer layers.",
    "num_q_heads": "H: query heads of a layer.",
    "num_kv_heads": "K: key and value heads; each serves H / K query heads.",
    "head_dim": "D: width of a head, even.",
    "ffn_dim": "F: width of the feed-forward's hidden layer.",
    "rope_theta": "Base of the rotary embedding's wavelengths; Llama 2 has 10000, Llama 3 500000.",
    "norm_eps": "Added to the mean square in RMSNorm.",
    "tied_embeddings": "Embedding and head share their weights.",
    "dtype": "Of compute; parameters are float32 in any case.",
    "vocab_multiple": "The stored vocabulary is padded to a multiple of this.",
}


def _model_options(info: StructTypeInfo) -> StructConstructorSpec | None:
    """LlamaConfig's fields as options. tyro makes a choice of subcommands of a part that may be
    None; here rope_scaling has an option for each of its fields, as every other part has."""
    if info.type is not LlamaConfig:
        return None
    hints: dict[str, Any] = get_type_hints(LlamaConfig, include_extras=True)
    values = {f.name: getattr(info.default, f.name) for f in dataclasses.fields(LlamaConfig)}
    hints["rope_scaling"] = RopeScalingOptions
    recipe = RopeScalingOptions(**dataclasses.asdict(values["rope_scaling"] or RopeScaling()))
    if values["rope_scaling"] is None:
        recipe = dataclasses.replace(recipe, factor=None)
    values["rope_scaling"] = recipe

    def make(rope_scaling: RopeScalingOptions, **sizes: Any) -> LlamaConfig:
        given = dataclasses.asdict(rope_scaling)
        if rope_scaling.factor is not None:
            return LlamaConfig(rope_scaling=RopeScaling(**given), **sizes)
        for name, value in given.items():
            if name != "factor" and value != getattr(recipe, name):
                raise ValueError(
                    f"model.rope_scaling.{name} (={value}) needs a factor to scale by; add "
                    "--model.rope-scaling.factor, 8 in Llama 3.1"
                )
        return LlamaConfig(rope_scaling=None, **sizes)

    make.__doc__ = LlamaConfig.__doc__  # tyro's heading over the options
    fields = tuple(
        StructFieldSpec(name, hints[name], value, MODEL_HELP.get(name))
        for name, value in values.items()
    )
    return StructConstructorSpec(make, fields)


def recipe_field() -> tuple[Any]:
    """The type of a field that holds a recipe's RunConfig: its name first, then any override."""
    recipes = tuple(
        Annotated[
            RunConfig,
            tyro.conf.subcommand(
                name, default=recipe(), description=inspect.getdoc(recipe), prefix_name=False
            ),
        ]
        for name, recipe in RECIPES.items()
    )
    return (Annotated[Union[recipes], tyro.conf.arg(name="")],)  # noqa: UP007


def recipe_registry() -> ConstructorRegistry:
    """What tyro needs to know of a recipe's parts."""
    registry = ConstructorRegistry()
    registry.struct_rule(_model_options)
    return registry
