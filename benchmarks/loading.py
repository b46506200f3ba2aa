# SPDX-License-Identifier: Apache-2.0
"""How fast a paged checkpoint's pages reach the host pool, beside how fast its files can be read at all.

Before each reading the files are dropped from the page cache. All checksums are verified on the way. A pool is memory
that nobody has touched before, which on a virtual machine can be slower to get than the files: so each load is done
more than once (the next one finds memory that the last one let go), and all times are recorded.

    python benchmarks/loading.py CHECKPOINT               # all planes, then the planes below 4, 5 and 6 bits
    python benchmarks/loading.py --layers 2               # of random pages, of the size of Qwen1.5-MoE's
"""

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import jax
import numpy as np
from random_checkpoint import RandomCheckpoint, qwen_moe_config
from record import append_result

from pagedweight_jax.checkpoint.draft import save
from pagedweight_jax.checkpoint.manifest import expected_arrays, page_name
from pagedweight_jax.checkpoint.paged import ARRAYS, PagedCheckpoint, open_checkpoint, read_ahead
from pagedweight_jax.config import KINDS
from pagedweight_jax.paging.host_pool import HostPool, fill_host_pool

BLOCK_BYTES = 16 << 20


def drop_caches(files: list[Path]) -> None:
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_files(files: list[Path]) -> None:
    block = memoryview(bytearray(BLOCK_BYTES))
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass


def cold(files: list[Path], read: Callable[[], object]) -> float:
    """Returns the seconds of ``read``, none of the files in the page cache."""
    drop_caches(files)
    start = time.perf_counter()
    read()
    return time.perf_counter() - start


def fresh_memory(size_bytes: int) -> float:
    """Returns at how many GB/s one thread gets memory that it never had."""
    start = time.perf_counter()
    np.empty(size_bytes, np.uint8)[::4096] = 1
    return size_bytes / (time.perf_counter() - start) / 1e9


def bytes_asked() -> int:
    """Returns the bytes that this process has asked the kernel for so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def write_random(out: Path, num_layers: int) -> None:
    """Writes a checkpoint of random pages; all else is zeros."""
    random = RandomCheckpoint.make(qwen_moe_config(num_layers, vocab_size=64), 3, 8)
    expected = expected_arrays(random.manifest)

    def groups():
        for layer in range(num_layers):
            places = [(kind, page) for kind in range(len(KINDS)) for page in range(8)]
            yield {page_name(layer, *place): random.load_pages(layer, *place) for place in places}
        rest = [name for name in expected if not name.startswith("pages/")]
        yield {name: np.zeros(expected[name][0], expected[name][1][0]) for name in rest}

    save(out, random.manifest, groups(), {})


def load(checkpoint: PagedCheckpoint, bits: int) -> HostPool:
    """Returns the pool with the planes below ``bits``, as the engine fills it."""
    manifest = checkpoint.manifest
    places = product(range(manifest.config.num_sparse_layers), range(len(KINDS)), range(bits))
    leaves = ((*place, leaf) for place, leaf in read_ahead(lambda place: checkpoint.load_pages(*place), places))
    return fill_host_pool(leaves, manifest.layouts(), jax.local_devices()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--bits", type=int, nargs="*", default=(4, 5, 6))
    parser.add_argument("--rounds", type=int, default=3, help="of every load, and of reading the files")
    parser.add_argument("--results", default="benchmarks/results/loading.jsonl")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.checkpoint is None:
            start = time.perf_counter()
            write_random(Path(folder) / "random", args.layers)
            print(f"written in {time.perf_counter() - start:.1f} s", flush=True)
        measure(args.checkpoint or Path(folder) / "random", args.bits, args.rounds, args.results)


def measure(path: Path, widths: list[int], rounds: int, results: str) -> None:
    checkpoint = open_checkpoint(path)
    files = [path for path in (checkpoint.path / ARRAYS / "pages").rglob("*") if path.is_file()]
    record = {"file_bytes": sum(path.stat().st_size for path in files), "fresh_gb_per_s": fresh_memory(1 << 30)}
    plain_s = [cold(files, lambda: read_files(files)) for _ in range(rounds)]
    record["disk_gb_per_s"] = [record["file_bytes"] / seconds / 1e9 for seconds in plain_s]
    load(checkpoint, 1)  # imports and first calls
    record["loads"] = []
    for bits in (checkpoint.manifest.max_bits, *widths):
        asked, seconds = bytes_asked(), []
        for _ in range(rounds):
            pools = []
            seconds.append(cold(files, lambda bits=bits, pools=pools: pools.append(load(checkpoint, bits))))
        pool_bytes = pools.pop().host_bytes
        record["loads"].append(
            {
                "bits": bits,
                "pool_bytes": pool_bytes,
                "asked_bytes": (bytes_asked() - asked) // rounds,
                "gb_per_s": [pool_bytes / s / 1e9 for s in seconds],
                "of_disk": pool_bytes / min(seconds) / 1e9 / max(record["disk_gb_per_s"]),
            }
        )
    record["peak_host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for name, value in record.items():
        for line in value if isinstance(value, list) else [value]:
            print(f"{name:16} {line}")
    append_result(results, "loading", record)


if __name__ == "__main__":
    main()
