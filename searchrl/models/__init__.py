# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Networks; the only room that names Flax: others use params and functions."""
