# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Experiments: builds them from configs, and runs the RL loop."""
