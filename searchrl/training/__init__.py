# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The learner of RL and its jitted steps; the optimiser; a supervised loop."""
