# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts: turn questions into finished trajectories, and sync the weights."""
