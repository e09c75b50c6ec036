# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The RL learner and its jitted steps, the optimiser, supervised training."""
