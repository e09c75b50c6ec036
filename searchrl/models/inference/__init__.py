# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Decoding with a KV cache that stays across turns: slots, stops, sampling."""
