# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts: questions in, finished trajectories out; weights for the engine."""
