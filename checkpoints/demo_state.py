# SPDX-License-Identifier: Apache-2.0
"""What a training run carries from step to step, on disk in one file that a stopped run resumes from."""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from demo_model import Params
from flax import struct


@struct.dataclass
class TrainState:
    """Float32 weights, optimizer moments and the place in the schedule.

    `total_steps` is 0 until the schedule is fitted to the measured step time; `seconds` is training time so far.
    """

    params: Params
    opt_state: optax.OptState
    step: int = 0
    total_steps: int = 0
    seconds: float = 0.0


def save_state(path: Path, state: TrainState) -> None:
    """Write the state in whole or not at all."""
    leaves = jax.device_get(jax.tree.leaves((state.params, state.opt_state)))
    place = {"step": state.step, "total_steps": state.total_steps, "seconds": state.seconds}
    with open(path.with_suffix(".tmp"), "wb") as file:
        np.savez(file, place=json.dumps(place), **{f"leaf_{i}": leaf for i, leaf in enumerate(leaves)})
    os.replace(path.with_suffix(".tmp"), path)


def load_state(path: Path, like: TrainState) -> TrainState:
    """The state saved at `path`, with the tree structure of `like`."""
    structure = jax.tree.structure((like.params, like.opt_state))
    with np.load(path) as file:
        leaves = [jnp.asarray(file[f"leaf_{i}"]) for i in range(structure.num_leaves)]
        params, opt_state = jax.tree.unflatten(structure, leaves)
        return like.replace(params=params, opt_state=opt_state, **json.loads(str(file["place"])))
