# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Networks. Only this package uses Flax; others use params and functions."""
