# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Indexes over a corpus: BM25, exact vectors, ScaNN, HNSW and imports."""
