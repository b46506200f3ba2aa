# SPDX-License-Identifier: Apache-2.0
import jax
import numpy as np
import pytest

from pagedweight_jax.paging.host_pool import fill_host_pool


def test_pool_holds_every_page_in_pinned_memory(layouts, leaves):
    pool = fill_host_pool(iter(leaves), layouts, jax.devices()[0])
    for layer, kind, plane, leaf in leaves:
        for expert, words in enumerate(leaf):
            page = pool.get(layer, expert, kind, plane)
            assert page.sharding.memory_kind == "pinned_host"
            np.testing.assert_array_equal(page, words)
    assert pool.host_bytes == sum(leaf.nbytes for *_, leaf in leaves)


def test_one_leaf_at_a_time_is_asked_for(layouts, leaves):
    filled = []

    def read():
        for leaf in leaves:
            yield leaf
            filled.append(leaf[:3])

    pool = fill_host_pool(read(), layouts, jax.devices()[0])
    assert list(pool.pages) == filled == [leaf[:3] for leaf in leaves]


def test_leaves_that_do_not_fit_the_layout_are_refused(layouts, leaves):
    device = jax.devices()[0]
    layer, kind, plane, leaf = leaves[1]
    for wrong in (leaf[:, :-1], leaf[0], leaf.astype(np.int32), leaf[..., :32]):
        with pytest.raises(ValueError, match=r"layer 0 kind 0 plane 1 must be uint32\[E, 4, 64\], got "):
            fill_host_pool([(layer, kind, plane, wrong)], layouts, device)
    with pytest.raises(ValueError, match="layer 0 kind 0 plane 1 come twice"):
        fill_host_pool([leaves[1], leaves[1]], layouts, device)
    with pytest.raises(KeyError):
        fill_host_pool([leaves[1]], layouts, device).get(0, 0, 0, 2)
