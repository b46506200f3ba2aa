# SPDX-License-Identifier: Apache-2.0
"""A paged checkpoint of random pages, in memory: full-size shapes without a model."""

from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from pagedweight_jax.checkpoint.layout import choose_frame_bytes
from pagedweight_jax.checkpoint.manifest import CalibrationRun, PagedManifest
from pagedweight_jax.config import KINDS, ModelConfig
from pagedweight_jax.models.weights import Weights, init_weights, without_experts


def qwen_moe_config(num_layers: int, num_experts: int = 60, vocab_size: int = 151_936) -> ModelConfig:
    """Returns Qwen1.5-MoE-A2.7B's shapes with the given number of layers, experts and tokens."""
    return ModelConfig(
        family="qwen2_moe",
        vocab_size=vocab_size,
        hidden_size=2048,
        num_layers=num_layers,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        intermediate_size=5632,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        num_experts=num_experts,
        num_experts_per_tok=4,
        norm_topk_prob=False,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        qkv_bias=True,
        tie_word_embeddings=False,
        max_position_embeddings=8192,
        sparse_layers=(True,) * num_layers,
        windows=(0,) * num_layers,
    )


@dataclass(frozen=True)
class RandomCheckpoint:
    """What the engine asks of a ``PagedCheckpoint``, made up from a seed: the same words at every reading."""

    manifest: PagedManifest
    seed: int = 0
    path: Path = Path("random.paged")  # where nothing is, hence no policy

    @classmethod
    def make(cls, config: ModelConfig, min_bits: int, max_bits: int, seed: int = 0) -> "RandomCheckpoint":
        manifest = PagedManifest(
            config=config,
            min_bits=min_bits,
            max_bits=max_bits,
            frame_bytes=choose_frame_bytes(config, min_bits, max_bits),
            calibration=CalibrationRun(
                text_sha256="0" * 64, samples=0, sequence_length=0, seed=0, min_tokens=0, uncalibrated_experts=0
            ),
            versions={},
        )
        return cls(manifest, seed)

    @property
    def sensitivity(self) -> np.ndarray:
        """Random, falling by about four times per bit, as measured ones do."""
        config, rng = self.manifest.config, np.random.default_rng(self.seed)
        widths = self.manifest.max_bits - self.manifest.min_bits + 1
        blocks = rng.lognormal(size=(config.num_sparse_layers, config.num_experts, len(KINDS), 1))
        return blocks * 4.0 ** -np.arange(widths)

    def load_dense(self, dtype: str) -> Weights:
        """Returns random dense weights; the routed experts are never materialised."""
        make = jax.jit(lambda key: without_experts(init_weights(self.manifest.config, key, dtype)))
        return make(jax.random.key(self.seed))

    def load_pages(self, layer: int, kind: int, page: int) -> np.ndarray:
        """Returns random planes with sorted normal LUTs, scaled so that activations keep their size."""
        layout = self.manifest.layouts()[kind]
        rng = np.random.default_rng((self.seed, layer, kind, page))
        experts = self.manifest.config.num_experts
        words = rng.integers(0, 2**32, (experts, layout.page_frames(page) * layout.frame_words), dtype=np.uint32)
        if layout.has_lut(page):
            # One row of centroids, shifted per row: sorting each row's own would take longer than all the rest.
            centroids = np.sort(rng.standard_normal(2 ** (page + 1))) * layout.columns**-0.5
            shift = rng.standard_normal((experts, layout.rows, 1)) * (0.1 * layout.columns**-0.5)
            lut = np.ascontiguousarray((centroids + shift).astype("<f2")).view("<u4").reshape(experts, -1)
            start = layout.lut_offset_words(page)
            words[:, start : start + lut.shape[1]] = lut
        return words.reshape(experts, -1, layout.frame_words)
