# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Simulated search engine: a writer produces useful or noisy documents."""
