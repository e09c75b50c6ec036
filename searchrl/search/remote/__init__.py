# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Engines behind HTTP: servers of Search-R1's /retrieve, and web search."""
