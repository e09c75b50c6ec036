# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A config in; an experiment, and the RL loop over its steps, out."""
