# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Engines that are asked over a wire: Search-R1's /retrieve, web search."""
