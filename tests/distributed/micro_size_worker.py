"""A process of `test_micro_size_of_ranks.py`: look for micro_size with a batch of its own."""

import os
import sys
import time
from pathlib import Path

# Op by op, for which nothing is compiled; the children inherit it.
os.environ["MS_JIT"] = "0"

from mindspore.communication import get_group_size, get_rank, init  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
from launch import report  # noqa: E402
from memory_networks import hangs, nothing, one_row, raises_its_own, sixteen_rows  # noqa: E402

from ms_gradaccum import find_micro_size  # noqa: E402
from ms_gradaccum.parallel.world import gather_counts  # noqa: E402

init()
rank, size = get_rank(), get_group_size()
results = {}
probes = []


def slowly(probe):
    """One rank keeps the others waiting for longer than a message may take."""
    probes.append([probe.micro_size, probe.fits])
    if rank == 0 and len(probes) == 1:
        time.sleep(35)


# One row of rank 0 fits in one piece. Sixteen of rank 1 take 800 MiB more than it in one piece, and 250 as single rows.
alone = []
find_micro_size(one_row, "64GiB", report=alone.append)
results["answer"] = find_micro_size((one_row, sixteen_rows)[rank], alone[0].peak + 500 * 2**20, report=slowly)
results["probes"] = probes


def failing(build):
    try:
        return find_micro_size(build, "1GiB")
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# On rank 1 the network fails in its child, and rank 0 does not go on; the second time before there is one.
results["child fails"] = failing(raises_its_own if rank == 1 else hangs)
results["refused"] = failing("no function" if rank == 1 else nothing)
# The ranks can still talk.
results["after"] = gather_counts(rank)
report(rank, results)
