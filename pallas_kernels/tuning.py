# SPDX-License-Identifier: Apache-2.0
"""Block sizes of kernels, as measured: a small table per device, kernel and shape, and a heuristic for all else.

The table is ``tuning_table.py``, which ``python benchmarks/tune.py`` writes. No shape in it has the number of rows that
a step happens to hold: the order in which a kernel adds may follow from its block sizes, and a row's result must not
depend on how many rows there are.
"""

import jax

from pallas_kernels.tuning_table import TABLE


def device_kind() -> str:
    """Returns the name of the device that is compiled for: the mesh's where it names one, else the first."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return device.device_kind if device else jax.devices()[0].device_kind


def key(kernel: str, shape: tuple[int, ...]) -> str:
    """Returns the table's name of a kernel on a shape."""
    return f"{kernel} {' x '.join(map(str, shape))}"


def tuned(kernel: str, shape: tuple[int, ...], heuristic: dict[str, int], table=TABLE) -> dict[str, int]:
    """Returns block sizes by name: ``heuristic``, where the device's table does not know better.

    Args:
      kernel: the package's name.
      shape: what the kernel is compiled for, without the number of rows.
      heuristic: the sizes on an unknown device or shape.
      table: from device and ``key`` to sizes.
    """
    return heuristic | table.get(device_kind(), {}).get(key(kernel, shape), {})
