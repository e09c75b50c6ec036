# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A search engine that a writer simulates: documents on request, good or bad."""
