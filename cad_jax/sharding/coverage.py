"""Whether tasks are exact: right homes, and every allowed (query, key) pair covered exactly once.

All functions raise ValueError with the rule, the numbers and the cure; errors name the document.
"""

import numpy as np

from cad_jax.sharding.tasks import (
    DOCUMENT,
    K_STOP,
    Q_START,
    TASK_FIELDS,
    document_starts,
    sort_tasks,
)


def check_lengths(
    lengths: np.ndarray, servers: int, tokens_per_server: int, starts: np.ndarray | None = None
) -> None:
    """Lengths are whole numbers from 0, and fit the pool together; from `starts` (end to end by
    default) they follow one another within the pool.
    """
    negative = np.flatnonzero(lengths < 0)
    if len(negative):
        at = int(negative[0])
        raise ValueError(
            f"document lengths must not be negative, got {lengths[at]} for document {at}: "
            "leave it out or give it length 0"
        )
    total, room = int(lengths.sum()), servers * tokens_per_server
    if total > room:
        raise ValueError(
            f"documents must fit servers * tokens_per_server = {servers} * {tokens_per_server} = "
            f"{room} tokens, got {total}: plan fewer documents, or raise tokens_per_server to "
            f"{-(-total // servers)}"
        )
    if starts is not None:
        _check_starts(lengths, starts, room)


def _check_starts(lengths: np.ndarray, starts: np.ndarray, room: int) -> None:
    if starts.shape != lengths.shape:
        raise ValueError(
            f"there must be one start per document, got {len(starts)} starts for {len(lengths)} "
            "documents: give each document's first token, or leave starts out"
        )
    free = np.append(0, starts + lengths)  # the first token after the document before
    early = np.flatnonzero(starts < free[:-1])
    if len(early):
        at = int(early[0])
        after = (
            f"document {at - 1} ends at token {free[at]}" if at else "the pool begins at token 0"
        )
        raise ValueError(
            f"documents must not overlap and must come in token order, got document {at} from token "
            f"{starts[at]} where {after}: move it behind, or sort documents by their starts"
        )
    if free[-1] > room:
        raise ValueError(
            f"documents must end within the pool's {room} tokens, got document {len(starts) - 1} in "
            f"tokens [{starts[-1]}, {free[-1]}): start it earlier"
        )


def check_tasks(
    lengths: np.ndarray,
    tasks: np.ndarray,
    servers: int,
    tokens_per_server: int,
    starts: np.ndarray | None = None,
) -> None:
    """Each task by itself: ranges within its document, at its home; no query row twice a server."""
    tasks = sort_tasks(tasks)
    starts = document_starts(lengths) if starts is None else starts
    document, q_start, q_stop, k_start, k_stop, home, server = tasks.T

    def refuse(bad: np.ndarray, rule: str) -> None:
        if bad.any():
            row = tasks[np.flatnonzero(bad)[0]]
            said = ", ".join(f"{n} {v}" for n, v in zip(TASK_FIELDS, row.tolist(), strict=True))
            raise ValueError(f"{rule}; task of document {row[DOCUMENT]}: {said}. Plan again")

    refuse(
        (document < 0) | (document >= len(lengths)),
        f"tasks must name one of the {len(lengths)} documents",
    )
    refuse(
        (server < 0) | (server >= servers) | (home < 0) | (home >= servers),
        f"home and server must be among the {servers} servers",
    )
    length = lengths[document]
    refuse(
        (q_start < 0) | (q_start >= q_stop) | (q_stop > length),
        "queries must be a non-empty range within the document",
    )
    refuse(
        (k_start < 0) | (k_start >= k_stop) | (k_stop > q_stop),
        "keys must be a non-empty range that ends by q_stop (later keys are never attended)",
    )
    start = starts[document]
    refuse(
        ((start + q_start) // tokens_per_server != home)
        | ((start + q_stop - 1) // tokens_per_server != home),
        "all queries of a task must live on its home rank",
    )
    shared = np.zeros(len(tasks), bool)
    shared[1:] = (
        (server[1:] == server[:-1]) & (document[1:] == document[:-1]) & (q_start[1:] < q_stop[:-1])
    )
    refuse(shared, "two tasks of one server must not share query rows")


def check_coverage(lengths: np.ndarray, tasks: np.ndarray) -> None:
    """Together: every (query, key) pair with key <= query is covered exactly once."""
    order = np.argsort(tasks[:, DOCUMENT], kind="stable")
    bounds = np.searchsorted(tasks[order, DOCUMENT], np.arange(len(lengths) + 1))
    for document, length in enumerate(lengths.tolist()):
        if length:
            mine = tasks[order[bounds[document] : bounds[document + 1]]]
            _check_document(document, length, mine[:, Q_START : K_STOP + 1].tolist())


def _check_document(document: int, length: int, ranges: list[list[int]]) -> None:
    """Sweeps the queries between all cuts: there the key ranges must follow one another from 0."""
    cuts = sorted({0, length, *(x for r in ranges for x in r[:2])})
    ranges.sort(key=lambda r: r[0])
    live: list[list[int]] = []
    upcoming = 0
    for start, stop in zip(cuts, cuts[1:], strict=False):
        while upcoming < len(ranges) and ranges[upcoming][0] <= start:
            live.append(ranges[upcoming])
            upcoming += 1
        live = [r for r in live if r[1] > start]
        reach = 0
        for k_start, k_stop in sorted((r[2], min(r[3], stop)) for r in live):
            if k_start >= stop:
                continue
            if k_start != reach:
                what = "missing" if k_start > reach else "covered twice"
                low, high = sorted((k_start, reach))
                raise ValueError(
                    f"every allowed (query, key) pair must be covered exactly once; document "
                    f"{document}, queries [{start}, {stop}): keys [{low}, {high}) {what}. Plan again"
                )
            reach = k_stop
        if reach < stop:
            raise ValueError(
                f"every allowed (query, key) pair must be covered exactly once; document "
                f"{document}, queries [{start}, {stop}): keys [{reach}, {stop}) missing. Plan again"
            )
