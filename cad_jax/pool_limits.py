"""How large a pool may be: what 64 bits count, what this machine's memory holds. Works without jax."""

import math
from pathlib import Path

GIB = 2**30
MAX_POOL_TOKENS = 2**31  # one document that fills it has 2^61 pairs: all counts stay in 64 bits
MAX_TOLERANCE = 10  # beyond it a bound is none: a server may have eleven times its share
MAX_MICROBATCHES = 4096
# Planning holds tables of servers x servers, and of servers x documents. Bytes per entry of each, the
# most that was seen, over pools of 300 to 2,000 servers: one document that spans all of them.
SERVER_PAIR_BYTES, SERVER_DOCUMENT_BYTES = 80, 12


def planning_bytes(servers: int, documents: int) -> int:
    """Memory that planning so many documents over so many servers may take at its peak."""
    return servers * (servers * SERVER_PAIR_BYTES + documents * SERVER_DOCUMENT_BYTES)


def available_bytes() -> float:
    """Memory this process may still take; infinity where the system does not say."""
    limits = [math.inf]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits += [int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:")]
        group = Path("/sys/fs/cgroup")  # a container's limit, where there is one
        limit, used = (int((group / f"memory.{x}").read_text()) for x in ("max", "current"))
        limits.append(limit - used)
    except (OSError, ValueError):  # another system, another kind of group, "max" for no limit
        pass
    return min(limits)


def check_memory(servers: int, documents: int) -> None:
    """Raises ValueError, before anything large is allocated, where a plan may not fit the memory."""
    needed, available = planning_bytes(servers, documents), available_bytes()
    if needed > available:
        raise ValueError(
            f"a plan must fit the memory that is free ({available / GIB:.1f} GiB), and {documents} "
            f"documents over {servers} servers may take {needed / GIB:.1f} GiB, in tables that grow "
            "with servers x (servers + documents): plan fewer servers, or on a larger machine"
        )
