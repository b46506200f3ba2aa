# SPDX-License-Identifier: Apache-2.0
"""A full-size conversion, as ``pagedweight convert`` does it: reading, computing and writing apart.

    python benchmarks/random_source.py SOURCE              # Qwen1.5-MoE-A2.7B's shapes: 28.6 GB
    python benchmarks/conversion.py SOURCE OUT             # 100 sequences of 512 tokens, 3 to 8 bits

The source is dropped from the page cache first. OUT is removed at the end. The disk works beside the arithmetic: a
stage's seconds are its own, wall_s is what passed. Stopped by SIGTERM or Ctrl-C, it records how far it came
and removes that as well.
"""

import argparse
import resource
import shutil
import signal
import time
from pathlib import Path

from loading import drop_caches
from record import append_result

from pagedweight_jax.calibrate.convert import run
from pagedweight_jax.calibrate.prepare import costs, device_peak_bytes, prepare
from pagedweight_jax.calibrate.stopwatch import Stopwatch
from pagedweight_jax.checkpoint.paged import partial_folder

COMPUTE = ("calibrate", "quantize", "pack")


def host_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory() -> str:
    """Returns what is resident now, files' pages (libraries) apart."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    sizes = {name: int(fields[f"Rss{name}"].split()[0]) * 1024 / 1e9 for name in ("Anon", "File", "Shmem")}
    return ", ".join(f"{name.lower()} {size:.2f} GB" for name, size in sizes.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bits", type=int, nargs=2, default=(3, 8))
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--importance", default="inputs")
    parser.add_argument("--results", default="benchmarks/results/conversion.jsonl")
    args = parser.parse_args()

    start, watch, reached = time.perf_counter(), Stopwatch(), {}

    def say(what: str) -> None:
        so_far = ", ".join(f"{name} {spent:.1f}" for name, spent in watch.seconds.items())
        peaks = f"peak {host_peak_bytes() / 1e9:.2f} GB, device {device_peak_bytes() / 1e9:.2f} GB"
        print(f"{time.perf_counter() - start:6.1f} s: {what}; {so_far}; {peaks}, {memory()}", flush=True)

    def progress(stage: str, done: int, total: int) -> None:
        layer = done * job.manifest.config.num_layers // total
        if reached.get(stage) != layer:
            reached[stage] = layer
            say(f"{stage} {layer}")

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    drop_caches(list(args.source.glob("*.safetensors")))
    say("caches dropped")
    options = {"samples": args.samples, "sequence_length": args.sequence_length, "importance": args.importance}
    job = prepare(args.source, args.out, bits=tuple(args.bits), **options)
    expected = costs(job)
    say("prepared")
    written = args.out
    try:
        run(job, progress=progress, watch=watch)
    except KeyboardInterrupt:
        written = partial_folder(args.out)
    for number in (signal.SIGINT, signal.SIGTERM):  # a second one neither loses the record nor leaves half a folder
        signal.signal(number, signal.SIG_IGN)
    wall_s = time.perf_counter() - start
    config, layouts = job.manifest.config, job.manifest.layouts()
    record = {"layers": config.num_layers, "experts": config.num_experts, "bits": list(args.bits), **options}
    if written != args.out:
        record["stopped_at"] = reached
    record["weights"] = config.num_layers * config.num_experts * sum(layout.rows * layout.columns for layout in layouts)
    record["seconds"] = watch.seconds
    record["compute_s"] = sum(watch.seconds[stage] for stage in COMPUTE)
    record["wall_s"] = wall_s
    record["read_bytes"], record["hidden_bytes"] = expected.read_bytes, expected.hidden_bytes
    record["written_bytes"] = sum(path.stat().st_size for path in written.rglob("*") if path.is_file())
    weight_bytes = job.source.shapes.embed_VD.dtype.itemsize
    record["layer_float32_bytes"] = expected.layer_bytes // weight_bytes * 4
    record["peak_host_bytes"] = host_peak_bytes()
    held_bytes = record["peak_host_bytes"] - expected.hidden_bytes * expected.hidden_in_memory
    record["peak_layers"] = held_bytes / record["layer_float32_bytes"]
    record["expected_host_bytes"], record["expected_device_bytes"] = expected.ram_bytes, expected.device_bytes
    record["peak_device_bytes"] = device_peak_bytes()
    for name, value in record.items():
        print(f"{name:20} {value}")
    append_result(args.results, "conversion", record)
    shutil.rmtree(written, ignore_errors=True)  # stopped before its first finished step, it left none


if __name__ == "__main__":
    main()
