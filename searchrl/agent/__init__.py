# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The agent's text, on the host: prompts, actions, observations and rewards."""
