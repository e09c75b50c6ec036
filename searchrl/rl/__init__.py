# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""RL math on arrays, pure functions: advantages, losses and algorithms."""
