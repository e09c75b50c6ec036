# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Dr. Zero, arXiv:2601.07055: a proposer and a solver that train each other."""
