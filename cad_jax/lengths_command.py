"""`cad-jax lengths`: the token lengths of a recipe's documents, as a file and as statistics."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console

from cad_jax.command_line import check_outputs, run_command, writing
from cad_jax.config import RunConfig
from cad_jax.launch import open_data
from cad_jax.lengths_report import length_statistics, statistics_table, write_lengths
from cad_jax.recipe_arguments import recipe_field, recipe_registry
from cad_jax.sources import Source
from cad_jax.token_store import open_store
from cad_jax.tokenizer import open_tokenizer


@dataclass(frozen=True)
class LengthsConfig:
    """Which lengths, and where they go."""

    out: Path | None = None
    """Write one length in tokens a line here, for plan, simulate, compile and advise."""
    pieces: tyro.conf.FlagCreatePairsOff[bool] = False
    """The pieces that training packs, after cutting, instead of whole documents."""


@dataclass(frozen=True)
class LengthsArgs:
    """Lengths as the command line asks for them."""

    config: RunConfig
    lengths: LengthsConfig


def parse(arguments: list[str]) -> LengthsArgs:
    """The arguments after `cad-jax lengths`. Exits with code 2 and a message if they are wrong."""
    fields: list[Any] = [
        ("config", *recipe_field()),
        ("lengths", tyro.conf.OmitArgPrefixes[LengthsConfig]),
    ]
    shape = dataclasses.make_dataclass("LengthsArgs", fields, frozen=True)
    parsed = tyro.cli(
        shape,
        prog="cad-jax lengths",
        description="Lengths of a recipe's documents in tokens of its tokenizer: `cad-jax lengths text_folder "
        "--data.paths 'folder/**/*.txt' --out lengths.txt`. Every field of the recipe can be overridden.",
        args=arguments,
        registry=recipe_registry(),
        config=(tyro.conf.CascadeSubcommandArgs, tyro.conf.AvoidSubcommands),
    )
    return LengthsArgs(parsed.config, parsed.lengths)


def source_of(config: RunConfig) -> Source:
    """The recipe's documents."""
    return Source(config.data.source, config.data.paths, config.data.jsonl_field)


def recipe_lengths(config: RunConfig, *, pieces: bool) -> np.ndarray:
    """Lengths in tokens, int64 [N], of documents, each with the token that closes it where there is one; or
    of the pieces that training packs.

    Raises:
        ValueError: the data cannot be read or is empty; with `pieces`, also where it cannot be trained on.
    """
    if pieces:
        return open_data(config).pieces.lengths
    data = config.data
    tokenizer = open_tokenizer(data.tokenizer, data.end_of_document)
    return open_store(source_of(config), tokenizer, data.cache_dir).lengths


def run(args: LengthsArgs, console: Console | None = None) -> np.ndarray:
    """Prints the statistics, writes the file where asked; returns the lengths.

    Raises:
        ValueError: see `recipe_lengths`; or the file cannot be written.
    """
    console = console or Console()
    out = args.lengths.out
    check_outputs({"--out": out}, args.config.input_files())
    lengths = recipe_lengths(args.config, pieces=args.lengths.pieces)
    what = "pieces" if args.lengths.pieces else "documents"
    title = f"{what} of {args.config.name} in tokens of {args.config.data.tokenizer}"
    console.print(statistics_table(length_statistics(lengths), title))
    if out is not None:
        with writing(out) as path:
            write_lengths(lengths, path)
        console.print(f"wrote {out}")
    return lengths


def main(arguments: list[str]) -> int:
    """Run `cad-jax lengths`; returns the exit code."""
    return run_command("lengths", lambda: run(parse(arguments)))
