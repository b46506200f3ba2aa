# SPDX-License-Identifier: Apache-2.0
"""What the live view and the timeline have in common."""

BLUE, ORANGE, SKY, GREEN, VERMILION = "#0072B2", "#E69F00", "#56B4E9", "#009E73", "#D55E00"
"""Okabe and Ito's palette: told apart by colour-blind eyes too. Weights are blue, the KV cache is orange."""

RATE_BOUNDARIES = 8
"""A token rate is the mean over so many boundaries."""
