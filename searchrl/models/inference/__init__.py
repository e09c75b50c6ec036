# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Decoding with a KV cache that persists across turns of a trajectory."""
