"""One packed microbatch: documents laid in rows, and what each row has to predict."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class PackedBatch(NamedTuple):
    """One microbatch of `tokens` rows: N pieces in one nano-batch, or in two of tokens / 2 rows.

    The pieces of a nano-batch lie end to end, padding behind them; the second begins at row
    tokens / 2. A piece is a whole document unless the document was cut. Targets are the next token
    of the same piece: its last token has none (a document's last token ends it, so nothing is left
    to predict). Rows without a target, padding among them, have weight 0, target 0; padding has
    id 0 and position 0. `context_lost_tokens` counts the tokens of pieces that do not begin their
    document.
    """

    lengths: np.ndarray  # int64 [N], in order of placement
    document_ids: np.ndarray  # int64 [N], index of the document in the data
    document_starts: np.ndarray  # int64 [N], where in its document the piece begins
    ids: np.ndarray  # int32 [tokens]
    positions: np.ndarray  # int32 [tokens], from 0 in every piece
    targets: np.ndarray  # int32 [tokens]
    weights: np.ndarray  # float32 [tokens], 1 where there is a target, else 0
    padding_tokens: int  # of all nano-batches
    target_tokens: int
    context_lost_tokens: int
    nano_lengths: tuple[np.ndarray, ...]  # `lengths` by nano-batch, one or two

    def undivided(self) -> PackedBatch:
        """The same pieces in the same order as one nano-batch: end to end, all padding last."""
        tokens = self.ids.size
        nano_tokens = tokens // len(self.nano_lengths)
        begins = np.arange(len(self.nano_lengths)) * nano_tokens
        ends = begins + [int(lengths.sum()) for lengths in self.nano_lengths]
        used = [np.arange(*rows) for rows in zip(begins, ends, strict=True)]
        padding = [np.arange(*rows) for rows in zip(ends, begins + nano_tokens, strict=True)]
        order = np.concatenate([*used, *padding])
        return self._replace(
            ids=self.ids[order],
            positions=self.positions[order],
            targets=self.targets[order],
            weights=self.weights[order],
            nano_lengths=(self.lengths,),
        )


def next_token_targets(ids: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Targets int32 [tokens] and weights float32 [tokens] of documents of `lengths` laid end to end
    in `ids` [tokens], padding behind them: the next token, except at each document's last token and
    in the padding, where both are 0."""
    weights = np.zeros(ids.size, np.float32)
    ends = np.cumsum(lengths)
    weights[: int(lengths.sum())] = 1.0
    weights[ends[lengths > 0] - 1] = 0.0
    targets = np.zeros(ids.size, np.int32)
    targets[:-1] = ids[1:]
    targets[weights == 0.0] = 0
    return targets, weights


def document_positions(lengths: np.ndarray, tokens: int) -> np.ndarray:
    """Position of each row within its document, int32 [tokens]; 0 in the padding."""
    used = int(lengths.sum())
    positions = np.zeros(tokens, np.int32)
    positions[:used] = np.arange(used) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return positions
