# SPDX-License-Identifier: Apache-2.0
"""Compiles the MoE kernels for an H200 on a machine without a GPU, and prints what each takes.

    pip install --no-deps jax-cuda13-plugin==V jax-cuda13-pjrt==V        V: the version of jax; best in its own venv
    python benchmarks/aot_h200.py

No driver and no toolkit is needed; with ``ptxas`` on the path, registers and spills are printed as well. Fails if a
kernel spills more than a few registers, or if XLA would copy the arena that it is given.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DUMP = Path(tempfile.mkdtemp(prefix="aot_h200_"))
os.environ["JAX_PLATFORMS"] = "cpu"  # with the wheels installed and no GPU, looking for one fails
os.environ["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 --xla_dump_to={DUMP} --xla_dump_emitter_re=ptx"
sys.path.insert(0, str(Path(__file__).parents[1]))

# JAX reads all of the above when it is imported, so these imports cannot stand at the top.
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from pallas_kernels.moe_ffn import pallas_triton  # noqa: E402
from pallas_kernels.moe_ffn.arg_specs import SPECS, abstract_args  # noqa: E402

NUM_FRAMES = 600_000
SPILLED_BYTES = 128
"""A kernel may spill as much as that: Gemma 4's gate_up and down spill 80 and 68; more registers cost more."""
TARGET = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
runtime_version { major: 13 }
dnn_version_info { major: 9 minor: 12 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  driver_version: "13.0.0"
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 150121545728
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
}
"""


def compile_for_h200(
    f, *args, donate_argnums=(), compiler_options=None
) -> tuple[jax.stages.Compiled, list[Path]]:
    """Returns ``f`` compiled for an H200 (it cannot run here) and the PTX files of its kernels.

    Args:
      f: a function of arrays.
      *args: pytrees of ``jax.ShapeDtypeStruct``.
      donate_argnums, compiler_options: as of ``jax.jit``.
    """
    topology = topologies.get_topology_desc("", "cuda", target_config=TARGET, topology="1x1x1")
    mesh = Mesh([topology.devices[0]], ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), args)
    shutil.rmtree(DUMP, ignore_errors=True)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # names the device, which JAX 0.11 asks for
        lowered = jax.jit(f, donate_argnums=donate_argnums).trace(*args).lower()
        compiled = lowered.compile(compiler_options=compiler_options)
    return compiled, sorted(DUMP.glob("*.ptx"))


def resources(ptx: Path) -> dict[str, tuple[int, int]]:
    """Returns (registers, bytes spilled) of each kernel in a PTX file, by ``ptxas``."""
    command = ["ptxas", "-arch=sm_90a", "-v", str(ptx), "-o", os.devnull]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    pattern = r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
    return {name: (int(used), int(spilled)) for name, spilled, used in re.findall(pattern, report, re.DOTALL)}


def main() -> int:
    failed = False
    print(f"jax {jax.__version__}, H200, arena of {NUM_FRAMES} frames")
    print(f"{'model':14}{'tokens':>7}{'seconds':>9}{'temp bytes':>12}   registers (bytes spilled)")
    for spec in SPECS.values():
        arena, pages, m_TD, ids_TK = abstract_args(spec, num_tokens=4, num_frames=NUM_FRAMES)
        start = time.perf_counter()

        def step(*args, spec=spec):
            return pallas_triton.moe_ffn(*args, spec.activation)

        compiled, files = compile_for_h200(step, arena, pages, m_TD, ids_TK)
        seconds = time.perf_counter() - start
        temp_bytes = compiled.memory_analysis().temp_size_in_bytes
        kernels = {}
        if shutil.which("ptxas"):
            for file in files:
                kernels |= resources(file) if file.stat().st_size else {}  # some modules have no kernel
        kernels = {name: used for name, used in kernels.items() if name in ("gate_up", "down")}
        shown = ", ".join(f"{name} {registers} ({spilled})" for name, (registers, spilled) in sorted(kernels.items()))
        print(f"{spec.name:14}{m_TD.shape[0]:>7}{seconds:>9.1f}{temp_bytes:>12}   {shown or 'no ptxas'}", flush=True)
        copies = temp_bytes > arena.size * jnp.dtype(arena.dtype).itemsize // 2
        failed |= copies or any(spilled > SPILLED_BYTES for _, spilled in kernels.values())
    shutil.rmtree(DUMP, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
